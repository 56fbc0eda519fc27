// The program's own lanes on a device, each alone and beside a matrix product: the copies, the gradient downloads and
// the updates that a run makes, by the same calls. One JSON line a measurement, of the best of three rounds.
//
//   device_bench cuda     on the first card
//   device_bench cpu      tiny, on the CPU device: whether it runs at all
//
// Exit code 0, or 1 and one line that says why.
#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <exception>
#include <functional>
#include <future>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "optim/adamw.h"
#include "optim/adamw_device.h"
#include "runtime/base/exception.h"
#include "runtime/base/seconds.h"
#include "runtime/device/device_memory.h"
#include "runtime/planning/update_scratch.h"
#include "runtime/spec/packing.h"
#include "runtime/state/streamed_state.h"
#include "swap/host_memory.h"

namespace tierflow {
namespace {

using Json = nlohmann::ordered_json;
using swap::StreamId;
using Move = std::function<void(std::size_t)>;  // enqueues the turn with that number
using Clock = std::chrono::steady_clock;

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr int kRounds = 3;

struct Sizes {
  std::vector<std::size_t> pieces;  // bytes of a copy
  std::size_t each_way;             // bytes that a round moves
  std::size_t piece_beside;         // bytes of gradient words of a download beside a product
  std::int64_t product;             // of a square matrix
  std::size_t elements;             // of an update
  double brief, lasting;            // seconds of what runs beside the other, and of the other
};
const Sizes kOnCard{{kMiB, 16 * kMiB, 64 * kMiB}, 1024 * kMiB, 64 * kMiB, 8192, std::size_t{64} << 20, 0.3, 1.0};
const Sizes kTiny{{kMiB}, 4 * kMiB, kMiB, 128, std::size_t{1} << 16, 0.002, 0.005};

// Four digits.
double brief(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.4g", value);
  return std::strtod(text, nullptr);
}

void show(const Json& line) {
  std::printf("%s\n", line.dump().c_str());
  std::fflush(stdout);
}

class Bench {
 public:
  Bench(swap::Device& device, bool cuda) : device_(device), cuda_(cuda), sizes_(cuda ? kOnCard : kTiny) {
    const std::size_t largest = sizes_.pieces.back();
    memory_ = value_or_throw(swap::HostMemory::create(std::vector<std::size_t>(4, largest), device));
    arena_ = value_or_throw(device.allocate(8 * largest));
    // Ordinary numbers: what is rounded and moved is no NaN.
    std::vector<float> ones(2 * largest, 1.0F);
    device_.copy_to_device(StreamId::upload, arena_.data(), reinterpret_cast<const std::byte*>(ones.data()),
                           8 * largest);
    throw_if(device_.synchronize(device_.record(StreamId::upload)));
    show({{"device", device.name()}, {"pinned", memory_->pin_note().empty()}, {"pin_note", memory_->pin_note()}});
  }

  void run() {
    for (const std::size_t bytes : sizes_.pieces)
      for (const int depth : {1, 2}) copies(bytes, depth);
    const auto options = at::TensorOptions().dtype(at::kBFloat16).device(cuda_ ? at::kCUDA : at::kCPU);
    a_ = at::randn({sizes_.product, sizes_.product}, options);
    b_ = at::randn({sizes_.product, sizes_.product}, options);
    product_ = at::empty_like(a_);
    for (const auto& [name, move] :
         {std::pair{"gradient download, mapped", down_rounded(sizes_.piece_beside)},
          {"gradient download in slots", down_in_slots(sizes_.piece_beside)},
          {"gradient download in slots, measured", down_in_slots(sizes_.piece_beside, /*measures=*/true)}})
      beside_product({{"beside", name}, {"mib", sizes_.piece_beside / kMiB}}, StreamId::download, move, "gb_s",
                     static_cast<double>(sizes_.piece_beside) / 1e9);
    if (!refused_.empty()) fail(io::ErrorKind::environment, "measuring on the device", refused_);
    updates();
  }

 private:
  // Slots 0 and 1 of the host go up, 2 and 3 come down; those of the device lie apart.
  Move up(std::size_t bytes) {
    return [this, bytes](std::size_t turn) {
      device_.copy_to_device(StreamId::upload, arena_.data() + turn % 2 * bytes, memory_->buffer(turn % 2).data(),
                             bytes);
    };
  }
  Move down(std::size_t bytes) {
    return [this, bytes](std::size_t turn) {
      device_.copy_to_host(StreamId::download, memory_->buffer(2 + turn % 2).data(),
                           arena_.data() + arena_.size() / 2 + turn % 2 * bytes, bytes);
    };
  }
  // So many bytes of bf16 words, rounded from twice as many on the device: by a kernel that writes to the host.
  Move down_rounded(std::size_t bytes) {
    return [this, bytes](std::size_t turn) {
      auto* words = reinterpret_cast<std::uint16_t*>(memory_->buffer(2 + turn % 2).data());
      const auto* sums = reinterpret_cast<const float*>(arena_.data() + arena_.size() / 2 + turn % 2 * 2 * bytes);
      device_.gradient_to_host(StreamId::download, words, sums, bytes / 2);
    };
  }

  // The same, rounded in one of two slots of the device, from which it is copied, as a run does it: with its sums of
  // squares.
  Move down_in_slots(std::size_t bytes, bool measures = false) {
    return [this, bytes, measures](std::size_t turn) {
      const std::size_t which = turn % 2;
      std::byte* slot = arena_.data() + arena_.size() / 4 + which * bytes;
      const auto* sums = reinterpret_cast<const float*>(arena_.data() + arena_.size() / 2 + which * 2 * bytes);
      device_.wait(StreamId::round, copied_[which]);
      device_.round_gradient(StreamId::round, reinterpret_cast<std::uint16_t*>(slot), sums, bytes / 2);
      const UpdateScratch found = measured_of(bytes / 2);
      std::byte* const sums_of_squares = arena_.data() + which * found.bytes;  // where copies go up
      if (measures) measure(reinterpret_cast<std::uint16_t*>(slot), bytes / 2, sums_of_squares, found);
      device_.wait(StreamId::download, device_.record(StreamId::round));
      device_.copy_to_host(StreamId::download, memory_->buffer(2 + which).data(), slot, bytes);
      if (measures)
        device_.copy_to_host(StreamId::download, memory_->buffer(which).data(), sums_of_squares, found.bytes);
      copied_[which] = device_.record(StreamId::download);
    };
  }

  void measure(const std::uint16_t* gradient, std::size_t elements, std::byte* to, const UpdateScratch& found) {
    device_.enqueue(StreamId::round, [=, this](const swap::DeviceQueue& queue) {
      try {
        measure_gradient(queue, gradient, elements, found, to);
      } catch (const std::exception& error) {
        refused_ = error.what();
      }
    });
  }

  // At most `depth` of them under way when the next is given: the lanes of a run have one.
  void in_flight(StreamId stream, int depth, std::size_t turns, const Move& move) {
    std::deque<swap::Event> under_way;
    const auto wait = [&] {
      throw_if(device_.synchronize(under_way.front()));
      under_way.pop_front();
    };
    for (std::size_t turn = 0; turn < turns; ++turn) {
      if (under_way.size() == static_cast<std::size_t>(depth)) wait();
      move(turn);
      under_way.push_back(device_.record(stream));
    }
    while (!under_way.empty()) wait();
  }

  static double best(const std::function<void()>& round) {
    round();
    double seconds = 1e30;
    for (int i = 0; i < kRounds; ++i) {
      const auto begin = Clock::now();
      round();
      seconds = std::min(seconds, seconds_since(begin));
    }
    return seconds;
  }

  void copies(std::size_t bytes, int depth) {
    const std::size_t turns = sizes_.each_way / bytes;
    const auto line = [&](const char* way, double moved, const std::function<void()>& round) {
      show({{"copy", way},
            {"mib", bytes / kMiB},
            {"depth", depth},
            {"gb_s", brief(moved * static_cast<double>(turns * bytes) / best(round) / 1e9)}});
    };
    const Move to = up(bytes), from = down(bytes);
    line("up", 1, [&] { in_flight(StreamId::upload, depth, turns, to); });
    line("down", 1, [&] { in_flight(StreamId::download, depth, turns, from); });
    line("gradient down, mapped", 1, [&] { in_flight(StreamId::download, depth, turns, down_rounded(bytes)); });
    line("gradient down in slots", 1, [&] { in_flight(StreamId::download, depth, turns, down_in_slots(bytes)); });
    line("both", 2, [&] {
      std::exception_ptr failed;
      std::thread other([&] {
        try {
          in_flight(StreamId::download, depth, turns, from);
        } catch (...) {
          failed = std::current_exception();
        }
      });
      in_flight(StreamId::upload, depth, turns, to);
      other.join();
      if (failed) std::rethrow_exception(failed);
    });
  }

  void multiply(std::size_t) { at::mm_out(product_, a_, b_); }

  // Seconds of work that is enqueued on a stream, by the device's clock where it has one.
  struct Lasting {
    swap::Event begin, end;
    Clock::time_point begun;
  };
  Lasting enqueued(StreamId stream, std::size_t turns, const Move& move) {
    Lasting made{.begin = device_.record_timed(stream), .begun = Clock::now()};
    for (std::size_t turn = 0; turn < turns; ++turn) move(turn);
    made.end = device_.record_timed(stream);
    return made;
  }
  double seconds(const Lasting& of) {
    throw_if(device_.synchronize(of.end));
    return device_.seconds_between(of.begin, of.end).value_or(seconds_since(of.begun));
  }

  // What the lane and the product do alone, and each while the other runs all the time.
  void beside_product(Json line, StreamId stream, const Move& move, const char* rate, double amount) {
    const Move product = [this](std::size_t turn) { multiply(turn); };
    const double flops = 2e-12 * static_cast<double>(sizes_.product * sizes_.product * sizes_.product);
    const auto alone = [&](StreamId on, const Move& work) { return best([&] { seconds(enqueued(on, 4, work)); }) / 4; };
    const double lane = alone(stream, move), multiplied = alone(StreamId::compute, product);
    line[std::string(rate) + "_alone"] = brief(amount / lane);
    line["tflops_alone"] = brief(flops / multiplied);
    for (const bool product_lasts : {true, false}) {
      const auto turns = [](double of, double each) { return static_cast<std::size_t>(of / each) + 1; };
      const std::size_t moves = turns(product_lasts ? sizes_.brief : sizes_.lasting, lane),
                        products = turns(product_lasts ? sizes_.lasting : sizes_.brief, multiplied);
      // From two threads: a device's queue takes some thousand operations, and whoever waits for room in one would
      // leave the other empty meanwhile.
      auto enqueuing = std::async(std::launch::async, [&] { return enqueued(stream, moves, move); });
      const Lasting computing = enqueued(StreamId::compute, products, product), moving = enqueuing.get();
      const double moved = seconds(moving), computed = seconds(computing);
      if (product_lasts)
        line[std::string(rate) + "_beside"] = brief(amount * static_cast<double>(moves) / moved);
      else
        line["tflops_beside"] = brief(flops * static_cast<double>(products) / computed);
    }
    show(line);
  }

  void updates() {
    constexpr std::size_t kBytesEach = 16;  // words, gradient, state and a report
    const std::size_t n = sizes_.elements;
    const io::Buffer arena = value_or_throw(device_.allocate(kBytesEach * n));
    const std::vector<std::byte> zeros(kBytesEach * n);
    device_.copy_to_device(StreamId::update, arena.data(), zeros.data(), zeros.size());
    throw_if(device_.synchronize(device_.record(StreamId::update)));
    auto* words = reinterpret_cast<std::uint16_t*>(arena.data());
    auto* report = reinterpret_cast<optim::DeviceReport*>(arena.data() + arena.size() - optim::kBlock);
    for (const auto& [name, moments] :
         {std::pair{"8 bits", optim::MomentFormat::block8}, {"bf16", optim::MomentFormat::bf16}}) {
      const optim::State state = state_view({.moments = moments}, n, words, arena.data() + 4 * n);
      const Move update = [&](std::size_t) {
        device_.enqueue(StreamId::update, [&, n](const swap::DeviceQueue& queue) {
          try {
            if (queue.device == swap::DeviceQueue::kHost)
              optim::adamw_update({}, words + n, state, n);
            else
              optim::adamw_update_on_device({}, words + n, state, state, n, report,
                                            {.device = queue.device, .stream = queue.stream});
          } catch (const std::exception& error) {
            refused_ = error.what();
          }
        });
      };
      beside_product({{"beside", "update on the device"}, {"moments", name}}, StreamId::update, update, "elements_g_s",
                     static_cast<double>(n) / 1e9);
      if (!refused_.empty()) fail(io::ErrorKind::environment, "the update on the device", refused_);
    }
  }

  swap::Device& device_;
  const bool cuda_;
  const Sizes& sizes_;
  std::unique_ptr<swap::HostMemory> memory_;
  io::Buffer arena_;
  swap::Event copied_[2];  // from each slot, the last time
  at::Tensor a_, b_, product_;
  std::string refused_;
};

int run(const std::string& name) {
  try {
    if (name == "cuda") DeviceMemory::cuda();  // brings torch's library up
    const auto device = open_device(name);
    Bench(*device, name == "cuda").run();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "device_bench: %s\n", error.what());
    return 1;
  }
}

}  // namespace
}  // namespace tierflow

int main(int count, char** words) {
  const std::string name = count == 2 ? words[1] : "";
  if (name != "cuda" && name != "cpu") {
    std::fprintf(stderr, "usage: device_bench cuda | cpu\n");
    return 2;
  }
  return tierflow::run(name);
}

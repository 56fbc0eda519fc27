#include "runtime/session/profiler.h"

#include <ATen/Parallel.h>
#include <torch/cuda.h>
#include <torch/types.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <thread>

#include "io/bench.h"
#include "io/checksum.h"
#include "optim/adamw.h"
#include "optim/adamw_device.h"
#include "runtime/base/exception.h"
#include "runtime/base/load_meter.h"
#include "runtime/base/seconds.h"
#include "runtime/device/device_memory.h"
#include "runtime/planning/repeat.h"
#include "runtime/state/streamed_state.h"
#include "swap/arrangement.h"
#include "swap/host_memory.h"

namespace tierflow {
namespace {

constexpr std::size_t kBytes = std::size_t{128} << 20;   // beyond the caches
constexpr std::size_t kElements = std::size_t{8} << 20;  // of an update: beyond the caches, too
constexpr double kEnoughSeconds = 0.25;
constexpr std::size_t kFewestPasses = 3, kMostPasses = 10'000;
constexpr std::uint64_t kFirstPass = std::uint64_t{64} << 20, kSecondPass = std::uint64_t{512} << 20;
constexpr double kFastFirstPass = 1.0;  // seconds: a slower drive is not asked for the second pass

// Rates of repeated passes, and how far those lay apart.
class RateMeter {
 public:
  // `amount` a second that `pass` moves, of the median pass.
  template <class Pass>
  double rate(double amount, Pass pass) {
    pass();  // pages and clocks
    const Reading reading = repeat(
        {.fewest = kFewestPasses, .most = kMostPasses, .seconds = kEnoughSeconds}, [] {}, pass);
    spread_ += reading.spread;
    ++readings_;
    return amount / reading.seconds;
  }
  double spread() const { return readings_ == 0 ? 0 : spread_ / readings_; }

 private:
  double spread_ = 0;
  int readings_ = 0;
};

// In pieces as large as a chunk's words, two of them on their way at once: as the lanes copy. rounds_first: gradients
// are rounded in slots of the device, as a session's are there.
void measure_copies(swap::Device& device, bool rounds_first, std::size_t piece, RateMeter& meter,
                    swap::MachineRates& rates) {
  io::Buffer arena = value_or_throw(device.allocate(kBytes + swap::kGradientSlots * piece));
  const auto memory = value_or_throw(swap::HostMemory::create({{kBytes}}, device));
  const std::span<std::byte> host = memory->buffer(0);
  const auto each = [&](swap::StreamId stream, std::size_t bytes, const auto& copy) {
    swap::Event before;
    for (std::size_t at = 0; at < bytes; at += piece) {
      copy(at, std::min(piece, bytes - at));
      swap::Event copied = device.record(stream);
      throw_if(device.synchronize(before));
      before = std::move(copied);
    }
    throw_if(device.synchronize(before));
  };
  constexpr auto up = swap::StreamId::upload, down = swap::StreamId::download;
  const auto amount = static_cast<double>(kBytes);
  rates.upload = meter.rate(amount, [&] {
    each(up, kBytes, [&](std::size_t at, std::size_t count) {
      device.copy_to_device(up, arena.data() + at, host.data() + at, count);
    });
  });
  rates.download = meter.rate(amount, [&] {
    each(down, kBytes, [&](std::size_t at, std::size_t count) {
      device.copy_to_host(down, host.data() + at, arena.data() + at, count);
    });
  });
  rates.cast = meter.rate(amount / 4, [&] {
    each(down, kBytes / 2, [&](std::size_t at, std::size_t count) {  // of bf16
      std::byte *to = host.data() + at, *slot = arena.data() + kBytes + at / piece % swap::kGradientSlots * piece;
      const auto* sums = reinterpret_cast<const float*>(arena.data() + 2 * at);
      if (!rounds_first) return device.gradient_to_host(down, reinterpret_cast<std::uint16_t*>(to), sums, count / 2);
      device.round_gradient(swap::StreamId::round, reinterpret_cast<std::uint16_t*>(slot), sums, count / 2);
      device.wait(down, device.record(swap::StreamId::round));
      device.copy_to_host(down, to, slot, count);
    });
  });
  rates.checksum = meter.rate(amount, [&] {
    std::uint64_t sum = 0;
    for (std::size_t at = 0; at < kBytes; at += piece)
      sum += io::extent_checksum(1, at, 1, host.subspan(at, std::min(piece, kBytes - at)));
    std::memcpy(host.data(), &sum, sizeof sum);
  });
}

double measure_fill(swap::Device& device, torch::Device torch_device, RateMeter& meter) {
  io::Buffer arena = value_or_throw(device.allocate(kBytes));
  const auto floats = torch::from_blob(arena.data(), {static_cast<std::int64_t>(kBytes / 4)},
                                       torch::TensorOptions().dtype(torch::kFloat32).device(torch_device));
  return meter.rate(static_cast<double>(kBytes), [&] {
    floats.zero_();
    if (torch_device.is_cuda()) torch::cuda::synchronize();
  });
}

// Updates chunks of so many elements as OptimizerWork does.
double measure_update(const StateFormat& format, std::size_t chunk_elements, UpdateThreads& threads, RateMeter& meter) {
  const bool eight_bits = format.moments == optim::MomentFormat::block8;
  const std::size_t chunks = kElements / chunk_elements, elements = chunks * chunk_elements,
                    state_bytes = (eight_bits ? 5 : 10) * chunk_elements;  // at least what lo, m, v and scales take
  io::Buffer words = io::allocate_buffer(2 * elements), gradients = io::allocate_buffer(2 * elements),
             states = io::allocate_buffer(state_bytes * chunks);
  if (!words || !gradients || !states) fail(io::ErrorKind::memory, "", "the system refused memory to measure with");
  auto* gradient = reinterpret_cast<std::uint16_t*>(gradients.data());
  auto* hi = reinterpret_cast<std::uint16_t*>(words.data());
  std::uint32_t random = 12345;
  for (std::size_t i = 0; i < elements; ++i) {  // ordinary numbers: a few binades, both signs
    random = random * 1664525U + 1013904223U;
    gradient[i] = static_cast<std::uint16_t>((random >> 31 << 15) | (0x3980U + (random >> 16 & 0x1ffU)));
    hi[i] = static_cast<std::uint16_t>(0x3c00U + (random >> 20 & 0xffU));
  }
  optim::AdamWParams params;
  return meter.rate(static_cast<double>(elements), [&] {
    ++params.step;
    for (std::size_t chunk = 0; chunk < chunks; ++chunk) {
      const optim::State state =
          state_view(format, chunk_elements, hi + chunk * chunk_elements, states.data() + chunk * state_bytes);
      threads.each(chunk_elements / optim::kNormSegment, [&](std::size_t segment) {
        const std::size_t first = segment * optim::kNormSegment;
        optim::adamw_update(params, gradient + chunk * chunk_elements + first, state_from(state, first),
                            optim::kNormSegment);
      });
    }
  });
}

// The same on a CUDA device, where the state has come there.
double measure_device_update(const StateFormat& format, std::size_t chunk_elements, swap::Device& device,
                             RateMeter& meter) {
  constexpr auto on = swap::StreamId::update;
  constexpr std::size_t kBytesEach = 16;  // words, gradient, state and a report
  io::Buffer arena = value_or_throw(device.allocate(kBytesEach * chunk_elements));
  const std::vector<std::byte> zeros(kBytesEach * chunk_elements);
  device.copy_to_device(on, arena.data(), zeros.data(), zeros.size());
  auto* words = reinterpret_cast<std::uint16_t*>(arena.data());
  auto* report = reinterpret_cast<optim::DeviceReport*>(arena.data() + arena.size() - optim::kBlock);
  const optim::State state = state_view(format, chunk_elements, words, arena.data() + 4 * chunk_elements);
  return meter.rate(static_cast<double>(chunk_elements), [&] {
    std::string refused;
    device.enqueue(on, [&](const swap::DeviceQueue& queue) {
      try {
        optim::adamw_update_on_device({}, words + chunk_elements, state, state, chunk_elements, report,
                                      {.device = queue.device, .stream = queue.stream});
      } catch (const std::exception& error) {
        refused = error.what();
      }
    });
    throw_if(device.synchronize(device.record(on)));
    if (!refused.empty()) fail(io::ErrorKind::environment, "the update on the device", refused);
  });
}

double measure_norm(std::size_t chunk_elements, UpdateThreads& threads, RateMeter& meter) {
  const std::size_t elements = kBytes / 2 / chunk_elements * chunk_elements;
  io::Buffer gradients = io::allocate_buffer(kBytes);
  if (!gradients) fail(io::ErrorKind::memory, "", "the system refused memory to measure with");
  const auto* gradient = reinterpret_cast<const std::uint16_t*>(gradients.data());
  return meter.rate(static_cast<double>(elements), [&] {
    for (std::size_t chunk = 0; chunk < elements; chunk += chunk_elements)
      threads.each(chunk_elements / optim::kNormSegment, [&](std::size_t segment) {
        double squares = 0;
        optim::gradient_norm_squared(gradient + chunk + segment * optim::kNormSegment, optim::kNormSegment, &squares);
      });
  });
}

void measure_storage(const SessionOptions& options, Length length, swap::MachineRates& rates) {
  io::BenchOptions bench{.folders = options.storage,
                         .bytes = kFirstPass * options.storage.size(),
                         .engine = options.engine,
                         .allow_buffered = options.allow_buffered,
                         .allow_any_filesystem = options.allow_any_filesystem};
  if (options.storage.size() > 1)  // stripes as a session's
    bench.speeds = value_or_throw(io::measure_speeds({.folders = options.storage,
                                                      .name = "tierflow-bench",
                                                      .engine = options.engine,
                                                      .allow_buffered = options.allow_buffered,
                                                      .allow_any_filesystem = options.allow_any_filesystem}));
  const auto started = std::chrono::steady_clock::now();
  io::BenchResult result = value_or_throw(io::bench_storage(bench));
  if (length == Length::whole && seconds_since(started) < kFastFirstPass) {
    bench.bytes = kSecondPass * options.storage.size();
    if (auto longer = io::bench_storage(bench); longer.ok()) result = std::move(longer).value();
  }
  rates.disk_read = 1e9 * result.read_gb_s;
  rates.disk_write = 1e9 * result.write_gb_s;
  rates.disk_mixed = 1e9 * result.mixed_gb_s;
}

}  // namespace

MachineProfile measure_machine(const SessionOptions& options, Length length, const Say& say) {
  const torch::NoGradGuard no_grad;
  MachineProfile profile;
  swap::MachineRates& rates = profile.rates;
  rates.cores = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  rates.threads = options.update_threads > 0 ? options.update_threads : at::get_num_threads();
  rates.compute_on_cores = options.device != "cuda";
  say("measuring copies and updates: about 3 s");
  const LoadMeter load;
  RateMeter meter;
  const auto device = open_device(options.device);
  const std::size_t chunk = chunk_elements_for(options.host_memory);
  measure_copies(*device, options.device == "cuda", swap::word_bytes(chunk), meter, rates);
  rates.fill = measure_fill(*device, options.device == "cuda" ? torch::kCUDA : torch::kCPU, meter);
  UpdateThreads threads(rates.threads);
  rates.measure = measure_norm(chunk, threads, meter);
  for (const Precision precision :
       {Precision::fp32_master_adam8, Precision::fp32_master_adam32, Precision::bf16_sr_adam8})
    for (const auto& [format, name] : state_formats(precision))
      if (!profile.update.contains(name)) {
        profile.update[name] = measure_update(format, chunk, threads, meter);
        if (options.device == "cuda")
          profile.device_update[name] = measure_device_update(format, chunk, *device, meter);
      }
  profile.readings = {.spread = meter.spread(), .other_cores = load.other_cores()};
  if (!options.storage.empty()) {
    say("measuring storage");
    measure_storage(options, length, rates);
  }
  return profile;
}

}  // namespace tierflow

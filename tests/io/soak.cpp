// io_soak MINUTES FOLDER [SEED]: volumes of random size, engine, depth and block under random requests and faults, for
// so long. Every byte that is read without an error must be the byte written last; every error must have a fault that
// explains it; memory and descriptors must not grow. Ends with a line of totals, or at the first thing that is wrong
// with the seed of its round: `io_soak 0 FOLDER SEED` plays that round alone.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>
#include <random>
#include <thread>

#include "tests/io/volume_fixture.h"
#include "tests/support/faulty_backend.h"

namespace tierflow::io {
namespace {

using testing::Fault;
using testing::FaultPlan;
using Clock = std::chrono::steady_clock;

struct Totals {
  std::uint64_t rounds = 0, requests = 0, bytes = 0, faults = 0, errors = 0, flips_seen = 0, stalls = 0;
};

[[noreturn]] void wrong(std::uint64_t seed, const std::string& what) {
  std::fprintf(stderr, "io_soak: seed %lu: %s\n", static_cast<unsigned long>(seed), what.c_str());
  std::exit(1);
}

std::size_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::size_t total = 0, resident = 0;
  file >> total >> resident;
  return resident * 4096;
}

std::size_t descriptors() {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

// One volume from its making to its end.
class Round {
 public:
  Round(std::uint64_t seed, const std::filesystem::path& folder, Totals& totals)
      : seed_(seed), folder_(folder), totals_(totals), random_(seed) {}

  void play() {
    const VolumeOptions options = draw_options();
    Result<std::unique_ptr<Volume>> made = Volume::create(options);
    if (!made) wrong(seed_, made.error().message());
    volume_ = std::move(made).value();
    const bool registered = below(2) == 0;
    const Buffer slab = allocate_buffer(registered ? 1 << 20 : 0);
    if (registered) volume_->register_memory(slab.bytes());
    cut_extents();
    if (below(2) == 0) plan_->shuffle(random_());
    const int turns = 20 + static_cast<int>(below(60));
    for (int turn = 0; turn < turns && !over_; ++turn) {
      if (below(4) == 0) set_fault();
      std::vector<std::size_t> chosen(extents_.size());
      for (std::size_t i = 0; i < chosen.size(); ++i) chosen[i] = i;
      std::shuffle(chosen.begin(), chosen.end(), random_);
      chosen.resize(1 + below(chosen.size()));
      run_together(chosen);
      if (below(6) == 0) flush();
    }
    end();
  }

 private:
  struct Extent {
    std::uint64_t offset = 0;
    std::size_t length = 0;
    std::uint64_t generation = 0;  // 0: unknown, a write of it failed
  };

  std::uint64_t below(std::uint64_t limit) { return random_() % limit; }

  VolumeOptions draw_options() {
    VolumeOptions options;
    const EngineKind engines[] = {EngineKind::io_uring, EngineKind::libaio, EngineKind::threads};
    options.engine = engines[below(3)];
    for (std::uint64_t i = 0, n = 1 + below(3); i < n; ++i) {
      options.folders.push_back(folder_ / ("drive" + std::to_string(i)));
      options.speeds.push_back(1.0 + static_cast<double>(below(4)));
    }
    options.block = std::size_t{4096} << below(9);
    options.depth = 1U << below(7);
    options.bytes = 1 + below(std::uint64_t{16} << 20);
    options.stall_warning = std::chrono::milliseconds{50};
    options.stall_limit = std::chrono::milliseconds{400};
    options.allow_buffered = options.allow_any_filesystem = true;
    options.wrap_backend = testing::faults(plan_);
    return options;
  }

  void cut_extents() {
    for (std::uint64_t at = 0; at < volume_->size();) {
      const std::uint64_t alignment = volume_->alignment();
      const std::uint64_t length = std::min(volume_->size() - at, alignment * (1 + below(1 << below(10))));
      extents_.push_back({.offset = at, .length = length});
      at += length;
    }
  }

  void set_fault() {
    const Fault::Kind kinds[] = {Fault::Kind::error, Fault::Kind::error, Fault::Kind::cut,
                                 Fault::Kind::delay, Fault::Kind::flip,  Fault::Kind::hold};
    constexpr int kNumbers[] = {EIO, EAGAIN, EINTR, ENOSPC, EROFS};
    fault_ = {.kind = kinds[below(6)],
              .action = below(2) == 0 ? Action::read : Action::write,
              .nth = 1 + below(40),
              .sticky = below(3) == 0,
              .error_number = kNumbers[below(5)],
              .keep = 4096 * below(4),
              .delay = std::chrono::milliseconds{1 + below(5)}};
    if (fault_.kind == Fault::Kind::flip) fault_.action = Action::read;
    if (fault_.kind == Fault::Kind::hold && below(4) != 0) fault_.kind = Fault::Kind::error;
    totals_.faults += plan_->hits();
    plan_->set(fault_);
  }

  void run_together(const std::vector<std::size_t>& chosen) {
    struct Open {
      Extent* extent;
      Op op;
      std::uint64_t generation;
      std::future<Completion> end;
    };
    std::vector<Open> open;
    for (std::size_t index : chosen) {
      Extent& extent = extents_[index];
      const Op op = extent.generation == 0 || below(2) == 0 ? Op::write : Op::read;
      Buffer buffer = allocate_buffer(extent.length);
      const std::uint64_t generation = op == Op::write ? ++newest_ : extent.generation;
      if (op == Op::write) fill(buffer.bytes(), extent.offset, generation);
      auto promise = std::make_shared<std::promise<Completion>>();
      open.push_back({&extent, op, generation, promise->get_future()});
      volume_->submit(Request{.op = op, .offset = extent.offset, .length = extent.length, .buffer = std::move(buffer)},
                      [promise](Completion&& completion) { promise->set_value(std::move(completion)); });
    }
    for (Open& one : open) {
      if (one.end.wait_for(std::chrono::seconds{30}) != std::future_status::ready) wrong(seed_, "a request hangs");
      judge(one.end.get(), *one.extent, one.op, one.generation);
    }
  }

  void judge(const Completion& completion, Extent& extent, Op op, std::uint64_t generation) {
    ++totals_.requests;
    totals_.bytes += extent.length;
    if (completion.error) {
      ++totals_.errors;
      if (plan_->hits() == 0) wrong(seed_, "an error without a fault: " + completion.error.message());
      if (op == Op::write) extent.generation = 0;
      if (completion.error.error_number == ETIMEDOUT) over_ = true;
      return;
    }
    if (op == Op::write) {
      extent.generation = generation;
    } else if (!holds(completion.buffer.bytes().first(extent.length), extent.offset, generation)) {
      if (fault_.kind != Fault::Kind::flip || plan_->hits() == 0) wrong(seed_, "a byte that was not written");
      ++totals_.flips_seen;
    }
  }

  void flush() {
    if (const Error error = volume_->flush(); error && !over_) {
      if (error.error_number != ETIMEDOUT) wrong(seed_, error.message());
      over_ = true;
    }
  }

  // Without faults everything that was written must be there; after a stall the volume must go all the same.
  void end() {
    totals_.faults += plan_->hits();
    plan_->clear();
    plan_->release();
    if (over_) {
      ++totals_.stalls;
      for (int i = 0; i < 3000; ++i) {
        unsigned in_flight = 0;
        for (const DriveStats& drive : volume_->stats()) in_flight += drive.in_flight;
        if (in_flight == 0) break;
        std::this_thread::sleep_for(std::chrono::milliseconds{1});
      }
    } else {
      for (const Extent& extent : extents_) {
        if (extent.generation == 0) continue;
        const Completion read =
            transfer(*volume_, Op::read, extent.offset, extent.length, allocate_buffer(extent.length));
        if (read.error) wrong(seed_, read.error.message());
        if (!holds(read.buffer.bytes().first(extent.length), extent.offset, extent.generation))
          wrong(seed_, "a byte is lost");
      }
    }
    volume_->remove_files();
    volume_.reset();
    ++totals_.rounds;
  }

  const std::uint64_t seed_;
  const std::filesystem::path folder_;
  Totals& totals_;
  std::mt19937_64 random_;
  std::shared_ptr<FaultPlan> plan_ = std::make_shared<FaultPlan>();
  Fault fault_;
  std::unique_ptr<Volume> volume_;
  std::vector<Extent> extents_;
  std::uint64_t newest_ = 0;
  bool over_ = false;
};

int soak(double minutes, const std::filesystem::path& folder, std::uint64_t seed) {
  Totals totals;
  std::size_t memory = 0, files = 0;
  const auto started = Clock::now();
  do {
    Round(seed++, folder, totals).play();
    if (totals.rounds == 50) {
      memory = resident_bytes();
      files = descriptors();
    }
  } while (std::chrono::duration<double>(Clock::now() - started).count() < 60 * minutes);
  if (files != 0 && descriptors() > files) wrong(seed, "descriptors leak: " + std::to_string(descriptors()));
  if (memory != 0 && resident_bytes() > memory + memory / 4 + (std::size_t{16} << 20))
    wrong(seed, "memory grows: " + std::to_string(resident_bytes()) + " bytes after " + std::to_string(memory));
  std::printf(
      "io_soak: %lu volumes, %lu requests, %.1f GB, %lu faults, %lu errors reported, %lu flipped reads seen, "
      "%lu stalls; no wrong byte, no hang; %zu MiB resident, %zu descriptors\n",
      static_cast<unsigned long>(totals.rounds), static_cast<unsigned long>(totals.requests),
      1e-9 * static_cast<double>(totals.bytes), static_cast<unsigned long>(totals.faults),
      static_cast<unsigned long>(totals.errors), static_cast<unsigned long>(totals.flips_seen),
      static_cast<unsigned long>(totals.stalls), resident_bytes() >> 20, descriptors());
  return 0;
}

}  // namespace
}  // namespace tierflow::io

int main(int count, char** words) {
  if (count < 3 || count > 4) {
    std::fprintf(stderr, "usage: io_soak MINUTES FOLDER [SEED]\n");
    return 2;
  }
  const std::uint64_t seed = count == 4 ? std::strtoull(words[3], nullptr, 10) : std::random_device()();
  std::printf("io_soak: seeds from %lu\n", static_cast<unsigned long>(seed));
  std::fflush(stdout);
  return tierflow::io::soak(std::strtod(words[1], nullptr), words[2], seed);
}

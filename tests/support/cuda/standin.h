#pragma once
// What a test may ask of the stand-in for the CUDA runtime: delays, failures, and whether it was used as it may be.
//
// Two devices. Streams are threads; the legacy default stream of each device and the streams that are not non-blocking
// wait for each other. Device memory is host memory that no one else has, poisoned when it is allocated. A copy of host
// memory that is not registered is read before the call returns, and one into it has arrived when the call returns; of
// registered memory, both happen when the stream comes to it. Work that fails leaves the device in error, as on a card:
// every later call gives that error.
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tests/support/cuda/cuda_runtime.h"

namespace tierflow::testing::cuda {

inline constexpr int kDevices = 2, kGreatestPriority = -5;

struct Settings {
  std::uint64_t seed =
      0;  // non-zero: streams start each work late, and what a copy writes is poisoned until it is there
  std::uint64_t failing_call = 0;  // the call that fails, counted from 1; 0: none
  std::uint64_t failing_work = 0;  // the work (copy or kernel) that fails while it runs, counted from 1; 0: none
  bool together = false;           // the threads of a block run together, so that kernels may use shuffles and barriers
  std::size_t device_bytes = std::size_t{1} << 30, pinned_bytes = std::size_t{1} << 30;  // there are
};

struct Report {
  std::uint64_t calls = 0, works = 0;  // those that could fail
  // What no program may do, and what was not given back: "an event is left", "registered memory was freed", ...
  std::vector<std::string> faults;
};

// The n-th call from here on fails; 0: none.
void fail_call_in(std::uint64_t n);
// From here on as after the first call of a process. Nothing may be in use.
void start(const Settings& settings);
// Waits for all streams.
Report finish();
// Work of the test's own: `work` runs when the stream comes to it, unless the device is in error.
cudaError_t enqueue(cudaStream_t stream, std::function<void()> work);

}  // namespace tierflow::testing::cuda

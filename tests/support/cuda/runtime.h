#pragma once
// Inside of the stand-in: its state, and what the calls share. Included by its own sources alone.
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tests/support/cuda/standin.h"
#include "tests/support/cuda/streams.h"

struct CUstream_st {
  CUstream_st(int device_, bool blocking_, std::uint64_t seed) : device(device_), blocking(blocking_), queue(seed) {}
  const int device;
  const bool blocking;  // waits for the legacy stream of its device, and that for it
  tierflow::testing::cuda::Stream queue;
  int priority = 0;
};
struct CUevent_st {
  int device;
  bool timed;
  tierflow::testing::cuda::MarkerPtr recorded;  // null until it is
};

namespace tierflow::testing::cuda {

struct Allocation {
  std::size_t bytes;
  int device;
};
struct Registration {
  std::size_t bytes;
  bool mapped;
  std::vector<MarkerPtr> users;  // copies and kernels that may not have ended

  void use(const MarkerPtr& marker) {
    std::erase_if(users, [](const MarkerPtr& user) { return user->done(); });
    users.push_back(marker);
  }
};

// All of it under `mutex`, and every call of it too, but for wait_for_all().
struct Runtime {
  std::mutex mutex;
  Settings settings;
  Report report;
  cudaError_t sticky = cudaSuccess;
  std::map<const std::byte*, Allocation> allocations;
  std::map<const std::byte*, Registration> registrations;
  std::vector<std::unique_ptr<CUstream_st>> streams;  // those destroyed too, until the end: their work goes on
  std::vector<cudaStream_t> destroyed;
  std::vector<std::unique_ptr<CUevent_st>> events;
  CUstream_st* legacy[kDevices] = {};

  // The error that a call must answer with, if one; it counts the call.
  std::optional<cudaError_t> refusal(cudaError_t injected = cudaErrorUnknown);
  void fault(std::string what) { report.faults.push_back(std::move(what)); }
  // Null, and a fault, where there is none.
  CUstream_st* stream_of(cudaStream_t stream);
  CUevent_st* event_of(cudaEvent_t event);
  bool overlaps_a_registration(const void* memory, std::size_t bytes) const;

  // What the rules of the legacy stream ask for is waited for, and `also`.
  MarkerPtr enqueue(CUstream_st* stream, std::function<void()> work, MarkerPtr also = nullptr);
  // A copy or a kernel: it may fail, and does not run on a device in error. `valid` is asked when its turn comes.
  MarkerPtr enqueue_work(CUstream_st* stream, std::function<bool()> valid, std::function<void()> work);
  void wait_for_all();
};

Runtime& runtime();
// Of the calling thread.
int& current_device();
cudaError_t& last_error();
// Gives the error back; it is the thread's last one.
cudaError_t fails(cudaError_t error);

// The entry that contains all of the range, or the end.
template <class Ranges>
auto holding(Ranges& ranges, const void* memory, std::size_t bytes) {
  const auto* begin = static_cast<const std::byte*>(memory);
  auto found = ranges.upper_bound(begin);
  if (found == ranges.begin()) return ranges.end();
  --found;
  return begin + bytes <= found->first + found->second.bytes ? found : ranges.end();
}

}  // namespace tierflow::testing::cuda

#include "tests/support/cuda/standin.h"

#include <algorithm>
#include <cstdlib>

#include "tests/support/cuda/runtime.h"
#include "tests/support/cuda/threads.h"

namespace tierflow::testing::cuda {
namespace {

// Of every compute capability.
bool a_card_takes(dim3 grid, dim3 block) {
  const auto within = [](dim3 size, unsigned x, unsigned y, unsigned z) {
    return size.x - 1 < x && size.y - 1 < y && size.z - 1 < z;  // none is zero
  };
  return within(grid, 0x7fffffffU, 65535, 65535) && within(block, 1024, 1024, 64) &&
         std::uint64_t{block.x} * block.y * block.z <= 1024;
}

}  // namespace

Runtime& runtime() {
  static Runtime only;
  return only;
}
int& current_device() {
  static thread_local int device = 0;
  return device;
}
cudaError_t& last_error() {
  static thread_local cudaError_t error = cudaSuccess;
  return error;
}
cudaError_t fails(cudaError_t error) {
  if (error != cudaSuccess) last_error() = error;
  return error;
}

std::optional<cudaError_t> Runtime::refusal(cudaError_t injected) {
  if (++report.calls == settings.failing_call) return fails(injected);
  if (sticky != cudaSuccess) return fails(sticky);
  return std::nullopt;
}

bool Runtime::overlaps_a_registration(const void* memory, std::size_t bytes) const {
  const auto* begin = static_cast<const std::byte*>(memory);
  return std::any_of(registrations.begin(), registrations.end(), [&](const auto& one) {
    return begin < one.first + one.second.bytes && one.first < begin + bytes;
  });
}

CUstream_st* Runtime::stream_of(cudaStream_t stream) {
  if (stream == nullptr || stream == cudaStreamLegacy) {
    const int device = current_device();
    if (legacy[device] == nullptr) {
      const std::uint64_t seed = settings.seed == 0 ? 0 : settings.seed * 41 + 3;
      legacy[device] = streams.emplace_back(std::make_unique<CUstream_st>(device, false, seed)).get();
    }
    return legacy[device];
  }
  const bool known = std::any_of(streams.begin(), streams.end(), [&](const auto& one) { return one.get() == stream; });
  if (known && std::find(destroyed.begin(), destroyed.end(), stream) == destroyed.end()) return stream;
  fault("a stream is used that is not there");
  return nullptr;
}

CUevent_st* Runtime::event_of(cudaEvent_t event) {
  for (const auto& one : events)
    if (one.get() == event) return event;
  fault("an event is used that is not there");
  return nullptr;
}

MarkerPtr Runtime::enqueue(CUstream_st* stream, std::function<void()> work, MarkerPtr also) {
  std::vector<MarkerPtr> after;
  const auto follow = [&](MarkerPtr marker) {
    if (marker != nullptr && !marker->done()) after.push_back(std::move(marker));
  };
  follow(std::move(also));
  CUstream_st* const null_stream = legacy[stream->device];
  if (stream == null_stream) {
    for (const auto& other : streams)
      if (other->blocking && other->device == stream->device) follow(other->queue.last());
  } else if (stream->blocking && null_stream != nullptr) {
    follow(null_stream->queue.last());
  }
  return stream->queue.enqueue(std::move(after), std::move(work));
}

MarkerPtr Runtime::enqueue_work(CUstream_st* stream, std::function<bool()> valid, std::function<void()> work) {
  const bool failing = ++report.works == settings.failing_work;
  return enqueue(stream, [this, failing, valid = std::move(valid), work = std::move(work)] {
    {
      std::lock_guard lock(mutex);
      if (sticky != cudaSuccess) return;
      if (failing || !valid()) {
        sticky = cudaErrorIllegalAddress;
        return;
      }
    }
    work();
  });
}

void Runtime::wait_for_all() {
  std::vector<MarkerPtr> ends;
  {
    std::lock_guard lock(mutex);
    for (const auto& stream : streams) ends.push_back(stream->queue.last());
  }
  for (const MarkerPtr& end : ends)
    if (end != nullptr) end->wait();
}

void fail_call_in(std::uint64_t n) {
  Runtime& at = runtime();
  std::lock_guard lock(at.mutex);
  at.settings.failing_call = n == 0 ? 0 : at.report.calls + n;
}

void start(const Settings& settings) {
  Runtime& at = runtime();
  at.wait_for_all();
  std::vector<std::unique_ptr<CUstream_st>> streams;
  {
    std::lock_guard lock(at.mutex);
    std::swap(streams, at.streams);  // joined below
    at.settings = settings;
    at.report = {};
    at.sticky = cudaSuccess;
    for (const auto& [memory, allocation] : at.allocations) std::free(const_cast<std::byte*>(memory));
    at.allocations.clear();
    at.registrations.clear();
    at.destroyed.clear();
    at.events.clear();
    std::fill(std::begin(at.legacy), std::end(at.legacy), nullptr);
  }
  streams.clear();
  current_device() = 0;
  last_error() = cudaSuccess;
}

Report finish() {
  Runtime& at = runtime();
  at.wait_for_all();
  std::lock_guard lock(at.mutex);
  Report report = at.report;
  const auto left = [&](std::size_t count, const char* what) {
    if (count != 0) report.faults.push_back(std::to_string(count) + " " + what + " left");
  };
  left(at.allocations.size(), "allocations of device memory are");
  left(at.registrations.size(), "registrations of host memory are");
  left(at.events.size(), "events are");
  left(at.streams.size() - at.destroyed.size() -
           static_cast<std::size_t>(
               std::count_if(std::begin(at.legacy), std::end(at.legacy), [](auto* s) { return s; })),
       "streams are");
  return report;
}

cudaError_t enqueue(cudaStream_t stream, std::function<void()> work) {
  Runtime& at = runtime();
  std::lock_guard lock(at.mutex);
  if (at.sticky != cudaSuccess) return fails(at.sticky);
  CUstream_st* on = at.stream_of(stream);
  if (on == nullptr) return fails(cudaErrorInvalidResourceHandle);
  at.enqueue(on, [&at, work = std::move(work)] {
    {
      std::lock_guard inner(at.mutex);
      if (at.sticky != cudaSuccess) return;
    }
    work();
  });
  return cudaSuccess;
}

cudaError_t launch(std::function<void()> kernel, std::vector<const void*> pointers, dim3 grid, dim3 block,
                   cudaStream_t stream) {
  Runtime& at = runtime();
  std::lock_guard lock(at.mutex);
  if (const auto error = at.refusal()) return *error;
  CUstream_st* on = at.stream_of(stream);
  if (on == nullptr || on->device != current_device()) return fails(cudaErrorInvalidResourceHandle);
  if (!a_card_takes(grid, block)) return fails(cudaErrorInvalidConfiguration);
  if (block.y != 1 || block.z != 1) {
    at.fault("a thread block has a second dimension, which the stand-in does not have");
    return fails(cudaErrorInvalidConfiguration);
  }
  auto valid = [&at, pointers, device = on->device] {
    return std::all_of(pointers.begin(), pointers.end(), [&](const void* pointer) {
      if (const auto host = holding(at.registrations, pointer, 1); host != at.registrations.end())
        return host->second.mapped;
      const auto found = holding(at.allocations, pointer, 1);
      if (found == at.allocations.end()) at.fault("a kernel was given memory that its device does not have");
      return found != at.allocations.end() && found->second.device == device;
    });
  };
  const bool together = at.settings.together;
  const MarkerPtr end = at.enqueue_work(on, std::move(valid), [&at, kernel = std::move(kernel), grid, block, together] {
    gridDim = {grid.x, grid.y, grid.z};
    blockDim = {block.x, 1, 1};
    for (blockIdx.z = 0; blockIdx.z < grid.z; ++blockIdx.z)
      for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y)
        for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) {
          if (!together) {
            for (threadIdx.x = 0; threadIdx.x < block.x; ++threadIdx.x) kernel();
          } else if (std::string wrong = run_block(kernel, block.x); !wrong.empty()) {
            std::lock_guard inner(at.mutex);
            at.fault(std::move(wrong));
            return;
          }
        }
  });
  for (const void* pointer : pointers)
    if (const auto host = holding(at.registrations, pointer, 1); host != at.registrations.end()) host->second.use(end);
  return cudaSuccess;
}

}  // namespace tierflow::testing::cuda

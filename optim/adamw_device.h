#pragma once
// The update on a CUDA device. Calls enqueue work and do not wait for it. Results have the bits of adamw_update and
// gradient_norm_squared (optim/adamw.h). Every pointer below is to memory that the device can address (its own, or
// pinned host memory), and is aligned as in adamw.h. Arguments that break a contract raise std::invalid_argument; if
// CUDA refuses something, that is a std::runtime_error. In a build without CUDA every call but device_update_is_built()
// raises std::runtime_error.
#include <cstddef>
#include <cstdint>

#include "optim/adamw.h"

namespace tierflow::optim {

bool device_update_is_built();

// Where work is enqueued: a cudaStream_t of the device `device`; null is its default stream.
struct CudaStream {
  int device = 0;
  void* stream = nullptr;
};

// The report of one call; valid when the stream has reached the end of the call.
struct DeviceReport {
  std::uint64_t skipped = 0;           // elements left as they were
  std::uint32_t largest_gradient = 0;  // with skip_call_if_not_finite: the largest magnitude, as the bits of a bf16
};

// `report` is set, whatever it held. Calls on one stream may share it where only its last value is read.
void adamw_update_on_device(const AdamWParams& params, const std::uint16_t* gradient, const State& from,
                            const State& to, std::size_t n, DeviceReport* report, const CudaStream& on);

// sums: one for each kNormSegment elements. Sets *not_finite to 1 if an element is not finite and leaves it alone
// otherwise, so that one word serves many calls.
void gradient_norm_squared_on_device(const std::uint16_t* gradient, std::size_t n, double* sums,
                                     std::uint32_t* not_finite, const CudaStream& on);

void split_master_on_device(const float* master, std::uint16_t* hi, std::uint16_t* lo, std::size_t n,
                            const CudaStream& on);
void join_master_on_device(const std::uint16_t* hi, const std::uint16_t* lo, float* master, std::size_t n,
                           const CudaStream& on);

}  // namespace tierflow::optim

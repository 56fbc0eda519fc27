#include <stdexcept>

#include "optim/adamw_device.h"

namespace tierflow::optim {
namespace {
[[noreturn]] void refuse() {
  throw std::runtime_error("optim: this build has no CUDA (nvcc was not found when it was configured)");
}
}  // namespace

bool device_update_is_built() {
  return false;
}
void adamw_update_on_device(const AdamWParams&, const std::uint16_t*, const State&, const State&, std::size_t,
                            DeviceReport*, const CudaStream&) {
  refuse();
}
void gradient_norm_squared_on_device(const std::uint16_t*, std::size_t, double*, std::uint32_t*, const CudaStream&) {
  refuse();
}
void split_master_on_device(const float*, std::uint16_t*, std::uint16_t*, std::size_t, const CudaStream&) {
  refuse();
}
void join_master_on_device(const std::uint16_t*, const std::uint16_t*, float*, std::size_t, const CudaStream&) {
  refuse();
}

}  // namespace tierflow::optim

#include "swap/device.h"

namespace tierflow::swap {

namespace {
io::Error no_cuda() {
  return {.kind = io::ErrorKind::environment,
          .operation = "open the CUDA device",
          .detail =
              "this build has no CUDA (nvcc was not found when it was configured); use --device cpu, or "
              "install the CUDA toolkit and build again"};
}
}  // namespace

io::Result<std::unique_ptr<Device>> open_cuda_device(int) {
  return no_cuda();
}
io::Result<CudaDeviceInfo> cuda_device_info(int) {
  return no_cuda();
}
std::uint64_t cuda_bytes_free(int) {
  return 0;
}
bool cuda_available() {
  return false;
}

}  // namespace tierflow::swap

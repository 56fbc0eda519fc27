#include "swap/device.h"

namespace tierflow::swap {

io::Result<std::unique_ptr<Device>> open_cuda_device(int) {
  return io::Error{.kind = io::ErrorKind::environment,
                   .operation = "open the CUDA device",
                   .detail =
                       "this build has no CUDA (nvcc was not found when it was configured); use --device cpu, or "
                       "install the CUDA toolkit and build again"};
}
bool cuda_available() {
  return false;
}

}  // namespace tierflow::swap

#include "runtime/base/exception.h"
#include "runtime/device/device_memory.h"

namespace tierflow {

DeviceMemory& DeviceMemory::cuda() {
  throw Exception(io::Error{.kind = io::ErrorKind::environment,
                            .operation = "open the CUDA device",
                            .detail =
                                "this build has no CUDA (nvcc, or a torch wheel with CUDA, was not found when it was "
                                "configured); use --device cpu, or install them and build again"});
}

}  // namespace tierflow

#include "runtime/base/exception.h"
#include "runtime/models/dense_weights_device.h"

namespace tierflow::models {

void dense_on_device(WeightFormat, const WeightLayout&, const std::byte*, std::uint16_t*, int, void*) {
  throw Exception(
      io::ErrorKind::environment,
      "this build has no CUDA (nvcc was not found when it was configured), so stored weights can be widened "
      "on the CPU alone; use --device cpu, or install nvcc and build again");
}

}  // namespace tierflow::models

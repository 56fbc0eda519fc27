#include "runtime/base/exception.h"
#include "runtime/models/row_kernels_device.h"

namespace tierflow::models::row_kernels {
namespace {

[[noreturn]] void refuse() {
  throw Exception(io::ErrorKind::environment,
                  "this build has no CUDA (nvcc was not found when it was configured), so a model's row kernels run on "
                  "the CPU alone; use --device cpu, or install nvcc and build again");
}

}  // namespace

bool are_built() {
  return false;
}
int capability(int) {
  return 0;
}

void rms_norm(const std::uint16_t*, std::uint16_t*, const std::uint16_t*, std::uint16_t*, float*, std::int64_t,
              std::int64_t, float, kernels::RmsRule, const Queue&) {
  refuse();
}
void rms_norm_backward(const std::uint16_t*, const std::uint16_t*, const float*, const std::uint16_t*,
                       const std::uint16_t*, std::uint16_t*, std::int64_t, std::int64_t, kernels::RmsRule,
                       const Queue&) {
  refuse();
}
void norm_weight_partials(const std::uint16_t*, const std::uint16_t*, const float*, float*, std::int64_t, std::int64_t,
                          std::int64_t, kernels::RmsRule, const Queue&) {
  refuse();
}
void add_partials(float*, const float*, std::int64_t, std::int64_t, const Queue&) {
  refuse();
}
void rope(std::uint16_t*, std::uint16_t*, std::int64_t, const float*, const float*, const std::int64_t*, std::int64_t,
          const kernels::RopeShape&, bool, float, const Queue&) {
  refuse();
}
void gated(kernels::Gate, const std::uint16_t*, const std::uint16_t*, std::uint16_t*, std::int64_t, const Queue&) {
  refuse();
}
void gated_backward(kernels::Gate, std::uint16_t*, std::uint16_t*, std::uint16_t*, std::int64_t, const Queue&) {
  refuse();
}
void cross_entropy(std::uint16_t*, const std::int64_t*, double*, std::int64_t, std::int64_t, float, bool,
                   const Queue&) {
  refuse();
}
void softmax_sums(const std::uint16_t*, const std::int64_t*, double*, std::int64_t, std::int64_t, std::int64_t,
                  const Queue&) {
  refuse();
}
void softmax_factors(const double*, const std::int64_t*, double, double*, std::int64_t, const Queue&) {
  refuse();
}
void softmax_gradient(std::uint16_t*, const std::int64_t*, const double*, std::int64_t, std::int64_t, std::int64_t,
                      const Queue&) {
  refuse();
}
void top_logits(const std::uint16_t*, std::int64_t, std::int64_t, std::int64_t, const float*, const std::int32_t*,
                float*, std::int32_t*, std::int64_t, const Queue&) {
  refuse();
}
void add_rows_at(float*, std::int64_t, const std::uint16_t*, const std::int64_t*, const std::int64_t*, std::int64_t,
                 std::int64_t, const Queue&) {
  refuse();
}

}  // namespace tierflow::models::row_kernels

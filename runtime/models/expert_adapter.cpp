#include "runtime/models/expert_adapter.h"

#include <ATen/ATen.h>

#include "runtime/models/layered_model.h"
#include "runtime/models/products.h"
#include "runtime/spec/expert_parameters.h"

namespace tierflow::models {

at::Tensor ExpertFactors::low(const at::Tensor& x) const {
  return a.defined() ? linear_map(x, a) * scale : at::Tensor();
}

at::Tensor ExpertFactors::low_gradient(const at::Tensor& d_y) const {
  return a.defined() ? matrix_product(d_y, b).mul_(scale) : at::Tensor();
}

at::Tensor with_product(const at::Tensor& y, const at::Tensor& low, const at::Tensor& b) {
  return low.defined() ? y + linear_map(low, b) : y;
}

ExpertAdapter::ExpertAdapter(const TensorIndex& index, const std::string& module, const std::string& name) {
  for (const std::string_view wrapper : {std::string_view(), kInnerWrapper}) {
    const std::string parameter = module + std::string(wrapper) + "." + name;
    a_ = index.find(parameter + ".lora_A.weight");
    if (a_ < 0) continue;
    b_ = index.at(parameter + ".lora_B.weight");
    scale_ = index.scale(b_);
    return;
  }
}

ExpertFactors ExpertAdapter::of(const std::vector<at::Tensor>& tensors, std::int64_t here) const {
  if (a_ < 0) return {};
  const auto one = [&](int position) {
    const at::Tensor& all = at_position(tensors, position);
    return all.defined() ? all.select(0, here) : all;
  };
  return {.a = one(a_), .b = one(b_), .scale = scale_};
}

}  // namespace tierflow::models

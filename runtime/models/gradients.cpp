#include "runtime/models/gradients.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "runtime/models/ops.h"

namespace tierflow {

void Gradients::set(std::size_t position, at::Tensor sum) {
  at(position);  // what lay there has its zeros
  sums_.at(position) = std::move(sum);
}

const at::Tensor& Gradients::operator[](std::size_t position) const {
  const at::Tensor& sum = sums_.at(position);
  if (fresh(position)) {
    fresh_[position] = false;
    if (sum.defined()) sum.zero_();
  }
  return sum;
}

const std::vector<at::Tensor>& Gradients::tensors() const {
  for (std::size_t position = 0; position < fresh_.size(); ++position) (*this)[position];
  return sums_;
}

void Gradients::add_product(int position, const at::Tensor& a, const at::Tensor& b) const {
  if (!wants(position)) return;
  const auto place = static_cast<std::size_t>(position);
  if (!rule_ || !fresh(place)) return add_product((*this)[place], a, b);
  fresh_[place] = false;
  rule_(sums_[place], a, b, Order::first);
}

void Gradients::add_product(const at::Tensor& part, const at::Tensor& a, const at::Tensor& b) const {
  if (!part.defined()) return;
  if (rule_)
    rule_(part, a, b, Order::later);
  else
    models::add_product(part, a, b);
}

void product_in_fp32(const at::Tensor& sum, const at::Tensor& a, const at::Tensor& b, Order order) {
  at::Tensor into = sum;
  const at::Tensor across = a.t();
  const bool wider = sum.scalar_type() != a.scalar_type();
  if (order == Order::first)
    wider ? at::mm_outf(across, b, sum.scalar_type(), into) : at::mm_out(into, across, b);
  else
    wider ? at::addmm_outf(sum, across, b, sum.scalar_type(), 1, 1, into) : at::addmm_out(into, sum, across, b);
}

bool products_overwrite(at::Device device) {
  return device.is_cuda();
}

Gradients gradients_on(at::Device device, std::vector<at::Tensor> sums, std::vector<bool> fresh) {
  if (!products_overwrite(device)) return {std::move(sums), {}, {}};
  return {std::move(sums), std::move(fresh), product_in_fp32};
}

void begin_region(const at::Tensor& region, const std::vector<at::Tensor>& sums, bool overwritten) {
  if (!overwritten) {
    region.zero_();
    return;
  }
  const auto* base = static_cast<const float*>(region.const_data_ptr());
  std::vector<std::pair<std::int64_t, std::int64_t>> covered;  // [first, second) of the region
  for (const at::Tensor& sum : sums) {
    if (!sum.defined() || sum.numel() == 0) continue;
    const std::int64_t begin = static_cast<const float*>(sum.const_data_ptr()) - base;
    if (begin >= 0 && begin < region.numel()) covered.emplace_back(begin, begin + sum.numel());
  }
  std::ranges::sort(covered);
  covered.emplace_back(region.numel(), region.numel());
  std::int64_t end = 0;
  for (const auto& [begin, next] : covered) {
    if (begin > end) region.narrow(0, end, begin - end).zero_();
    end = std::max(end, next);
  }
}

}  // namespace tierflow

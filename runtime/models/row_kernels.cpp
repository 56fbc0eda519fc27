#include "runtime/models/row_kernels.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <tuple>

#include "runtime/models/grain.h"
#include "runtime/models/row_kernels_device.h"

namespace tierflow::models::row_kernels {
namespace {

// Blocks of rows on a device: where rows are short, more than the CPU has threads for.
constexpr std::int64_t kFewestBlocks = 64, kMostBlocks = 1024, kPartials = std::int64_t{1} << 17;

// Calls kernel(queue) for the device of x; not for meta tensors, which have no memory.
template <class Kernel>
void enqueue(const char* name, const Tensor& x, Kernel kernel) {
  RECORD_USER_SCOPE(name);
  if (x.is_meta()) return;
  const auto device = x.device().index();
  kernel(Queue{.device = device, .stream = at::accelerator::getCurrentStream(device).native_handle()});
}

std::uint16_t* bits(const Tensor& t) {
  return t.defined() ? static_cast<std::uint16_t*>(t.data_ptr()) : nullptr;
}
template <class T>
const T* values(const Tensor& t) {
  return t.defined() ? t.const_data_ptr<T>() : nullptr;
}

}  // namespace

bool are_on(const at::Device& device) {
  return device.is_meta() || (device.is_cuda() && are_built());
}

RowBlocks norm_blocks(std::int64_t rows, std::int64_t n, std::int64_t most) {
  const std::int64_t block = std::max(grain_rows(n), (rows + most - 1) / most);
  return {.rows = block, .count = (rows + block - 1) / block};
}

Tensor rms_norm(const Tensor& x, const Tensor& added, const Tensor& weight, double eps, kernels::RmsRule rule,
                Tensor* rstd) {
  const std::int64_t n = x.size(-1), rows = x.numel() / n;
  Tensor out = at::empty_like(x);
  if (rstd != nullptr) *rstd = at::empty({rows}, x.options().dtype(at::kFloat));
  enqueue("tierflow::rms_norm", x, [&](const Queue& on) {
    rms_norm(bits(x), bits(added), bits(weight), bits(out), rstd != nullptr ? rstd->mutable_data_ptr<float>() : nullptr,
             rows, n, static_cast<float>(eps), rule, on);
  });
  return out;
}

Tensor rms_norm_backward(const Tensor& d_out, const Tensor& x, const Tensor& rstd, const Tensor& weight,
                         const Tensor& sum, kernels::RmsRule rule, const Tensor& residual) {
  const std::int64_t n = x.size(-1), rows = x.numel() / n;
  if (sum.defined()) {
    const RowBlocks blocks = norm_blocks(rows, n, std::clamp(kPartials / n, kFewestBlocks, kMostBlocks));
    const Tensor partials = at::empty({blocks.count, n}, x.options().dtype(at::kFloat));
    enqueue("tierflow::norm_weight_partials", x, [&](const Queue& on) {
      norm_weight_partials(bits(d_out), bits(x), values<float>(rstd), partials.mutable_data_ptr<float>(), rows,
                           blocks.rows, n, rule, on);
    });
    enqueue("tierflow::add_partials", x, [&](const Queue& on) {
      add_partials(sum.mutable_data_ptr<float>(), values<float>(partials), blocks.count, n, on);
    });
  }
  Tensor d_x = at::empty_like(x);
  enqueue("tierflow::rms_norm_backward", x, [&](const Queue& on) {
    rms_norm_backward(bits(d_out), bits(x), values<float>(rstd), bits(weight), bits(residual), bits(d_x), rows, n, rule,
                      on);
  });
  return d_x;
}

void rope(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin, RopeRule rule, double sign,
          const Tensor& positions) {
  const std::int64_t half = cos.size(-1);
  const Tensor c = cos.to(at::kFloat).contiguous(), s = sin.to(at::kFloat).contiguous();
  const Tensor rows = positions.defined() ? positions.contiguous() : positions;
  const kernels::RopeShape shape{c.numel() / half, q.size(2), q.size(3), 2 * half, rule.interleaved};
  enqueue("tierflow::rope", q, [&](const Queue& on) {
    rope(bits(q), bits(k), k.defined() ? k.size(2) : 0, values<float>(c), values<float>(s), values<std::int64_t>(rows),
         q.size(0) * q.size(1), shape, rule.rounded, static_cast<float>(sign), on);
  });
}

Tensor gated(kernels::Gate by, const Tensor& gate, const Tensor& up) {
  Tensor out = at::empty_like(gate);
  enqueue("tierflow::gated", gate,
          [&](const Queue& on) { gated(by, bits(gate), bits(up), bits(out), gate.numel(), on); });
  return out;
}

void gated_backward(kernels::Gate by, const Tensor& gate, const Tensor& up, const Tensor& d_out) {
  enqueue("tierflow::gated_backward", gate,
          [&](const Queue& on) { gated_backward(by, bits(gate), bits(up), bits(d_out), gate.numel(), on); });
}

void cross_entropy(const Tensor& logits, const Tensor& labels, const Tensor& losses, double scale, bool gradient) {
  enqueue("tierflow::cross_entropy", logits, [&](const Queue& on) {
    cross_entropy(bits(logits), values<std::int64_t>(labels), losses.mutable_data_ptr<double>(), logits.size(0),
                  logits.size(1), static_cast<float>(scale), gradient, on);
  });
}

void softmax_sums(const Tensor& logits, const Tensor& labels, std::int64_t first, const Tensor& sums) {
  enqueue("tierflow::softmax_sums", logits, [&](const Queue& on) {
    softmax_sums(bits(logits), values<std::int64_t>(labels), sums.mutable_data_ptr<double>(), logits.size(0), first,
                 logits.size(1), on);
  });
}

Tensor softmax_factors(const Tensor& sums, const Tensor& labels, double scale) {
  Tensor factors = at::empty({sums.size(0), 3}, sums.options());
  enqueue("tierflow::softmax_factors", sums, [&](const Queue& on) {
    softmax_factors(values<double>(sums), values<std::int64_t>(labels), scale, factors.mutable_data_ptr<double>(),
                    sums.size(0), on);
  });
  return factors;
}

void softmax_gradient(const Tensor& logits, const Tensor& labels, std::int64_t first, const Tensor& factors) {
  enqueue("tierflow::softmax_gradient", logits, [&](const Queue& on) {
    softmax_gradient(bits(logits), values<std::int64_t>(labels), values<double>(factors), logits.size(0), first,
                     logits.size(1), on);
  });
}

void top_logits(const Tensor& logits, std::int64_t first, const TopLogits& top) {
  const TopLogits before{.values = top.values.clone(), .ids = top.ids.clone()};
  enqueue("tierflow::top_logits", logits, [&](const Queue& on) {
    top_logits(bits(logits), first, logits.size(0), logits.size(1), values<float>(before.values),
               values<std::int32_t>(before.ids), top.values.mutable_data_ptr<float>(),
               top.ids.mutable_data_ptr<std::int32_t>(), top.ids.size(1), on);
  });
}

void add_rows_at(const Tensor& sum, const Tensor& ids, const Tensor& d) {
  const auto order = at::sort(ids, /*stable=*/true, /*dim=*/0, /*descending=*/false);
  const torch::Tensor &sorted = std::get<0>(order), &tokens = std::get<1>(order);
  enqueue("tierflow::add_rows_at", sum, [&](const Queue& on) {
    add_rows_at(sum.mutable_data_ptr<float>(), sum.size(0), bits(d), values<std::int64_t>(sorted),
                values<std::int64_t>(tokens), d.size(0), d.size(1), on);
  });
}

}  // namespace tierflow::models::row_kernels

#pragma once
// The operations of ops.h by row kernels of a device whose work is enqueued (row_kernels_device.h): one launch each but
// where said. On torch's meta device they do all but launch, so that launches are counted without a card: each is an
// at::RecordFunction of user scope, named "tierflow::...".
#include <ATen/ATen.h>

#include "runtime/models/kernels.h"
#include "runtime/models/ops.h"
#include "runtime/models/top_logits.h"

namespace tierflow::models::row_kernels {

// Dense bf16 with nothing to differentiate, which all row kernels take, the CPU's too. An undefined tensor is.
inline bool is_plain(const Tensor& t) {
  return !t.defined() ||
         (t.scalar_type() == at::kBFloat16 && t.is_contiguous() && !(t.requires_grad() && at::GradMode::is_enabled()));
}

// The device is CUDA, and this build has its kernels; or it is meta.
bool are_on(const at::Device& device);

// The kernels below take these.
template <class... Tensors>
bool take(const Tensor& first, const Tensors&... others) {
  return are_on(first.device()) && is_plain(first) && (is_plain(others) && ...);
}

// A sum that they add to, or none.
inline bool take_sum(const Tensor& sum) {
  return !sum.defined() || (sum.scalar_type() == at::kFloat && sum.is_contiguous());
}

// How the rows of a weight's gradient are split into blocks, whose sums are added one after the other: by the shape.
struct RowBlocks {
  std::int64_t rows = 0, count = 0;  // of a block; blocks
};
RowBlocks norm_blocks(std::int64_t rows, std::int64_t n, std::int64_t most);

// added: undefined, or what becomes x + added, which is normalised.
Tensor rms_norm(const Tensor& x, const Tensor& added, const Tensor& weight, double eps, kernels::RmsRule rule,
                Tensor* rstd);
// With a `sum`, three launches.
Tensor rms_norm_backward(const Tensor& d_out, const Tensor& x, const Tensor& rstd, const Tensor& weight,
                         const Tensor& sum, kernels::RmsRule rule, const Tensor& residual);

// k may be undefined.
void rope(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin, RopeRule rule, double sign,
          const Tensor& positions);

Tensor gated(kernels::Gate by, const Tensor& gate, const Tensor& up);
void gated_backward(kernels::Gate by, const Tensor& gate, const Tensor& up, const Tensor& d_out);

void cross_entropy(const Tensor& logits, const Tensor& labels, const Tensor& losses, double scale, bool gradient);
void softmax_sums(const Tensor& logits, const Tensor& labels, std::int64_t first, const Tensor& sums);
Tensor softmax_factors(const Tensor& sums, const Tensor& labels, double scale);
void softmax_gradient(const Tensor& logits, const Tensor& labels, std::int64_t first, const Tensor& factors);
// And two copies.
void top_logits(const Tensor& logits, std::int64_t first, const TopLogits& top);

// And torch's sort. Ids that are not rows of the sum are left out.
void add_rows_at(const Tensor& sum, const Tensor& ids, const Tensor& d);

}  // namespace tierflow::models::row_kernels

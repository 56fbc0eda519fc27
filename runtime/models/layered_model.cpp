#include "runtime/models/layered_model.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function_hook.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "runtime/base/exception.h"
#include "runtime/models/decoder.h"
#include "runtime/models/upload.h"

namespace tierflow {
namespace {

// Moves a leaf's gradient into its fp32 sum the moment it is complete.
struct AddAndRelease final : torch::autograd::PostAccumulateGradHook {
  explicit AddAndRelease(torch::Tensor sum) : sum_(std::move(sum)) {}
  void operator()(const torch::Tensor& leaf) override {
    const torch::NoGradGuard no_grad;
    add_rows(leaf.grad());
    leaf.mutable_grad().reset();
  }

 private:
  // In slices: torch would widen a gradient whole before it adds it.
  void add_rows(const torch::Tensor& gradient) {
    constexpr std::int64_t kSlice = 1 << 22;  // elements
    if (gradient.numel() <= kSlice) {
      sum_.add_(gradient);
      return;
    }
    const std::int64_t rows = gradient.size(0), slice = std::max<std::int64_t>(1, kSlice / (gradient.numel() / rows));
    for (std::int64_t row = 0; row < rows; row += slice) {
      const std::int64_t count = std::min(slice, rows - row);
      sum_.narrow(0, row, count).add_(gradient.narrow(0, row, count));
    }
  }

  torch::Tensor sum_;
};

}  // namespace

Shared shared_of(const MicroBatch& batch, torch::Device device) {
  Shared shared{.documents = batch.documents()};
  std::vector<torch::Tensor> parts = {batch.ids, batch.labels};
  if (!shared.documents.empty()) parts.insert(parts.end(), {batch.positions, document_ends(shared.documents)});
  parts = models::upload(parts, device);
  shared.ids = parts[0];
  shared.labels = parts[1];
  if (shared.documents.empty()) return shared;
  shared.positions = parts[2];
  shared.ends = parts[3];
  return shared;
}

Shared shared_of(const CachedRow& row, torch::Device device) {
  std::vector<torch::Tensor> positions;
  for (const CachedSpan& span : row.spans)
    positions.push_back(torch::arange(span.before, span.before + span.length, torch::kLong));
  const std::vector<torch::Tensor> parts = models::upload({row.ids, torch::cat(positions).unsqueeze(0)}, device);
  return {.ids = parts[0], .positions = parts[1], .cache = row.cache, .spans = row.spans};
}

std::int64_t Shared::longest() const {
  std::int64_t tokens = documents.empty() && spans.empty() ? ids.size(1) : 0;
  for (const Document& document : documents) tokens = std::max(tokens, document.length);
  for (const CachedSpan& span : spans) tokens = std::max(tokens, span.before + span.length);
  return tokens;
}

std::unique_ptr<StageInParts> LayeredModel::begin(int stage, const Weights& /*weights*/, const Carry& /*carry*/,
                                                  const Shared& /*shared*/) const {
  throw std::logic_error("stage " + std::to_string(stage) + " has no units on demand");
}

Shared LayeredModel::share_cached(const CachedRow& /*row*/, torch::Device /*device*/) const {
  fail_usage("layers of one's own do not generate text: export the model");
}

torch::Tensor LayeredModel::next_logits(const Weights& /*weights*/, const Carry& /*carry*/,
                                        const Shared& /*shared*/) const {
  throw Exception(io::ErrorKind::internal, "a model that does not generate text was asked for logits");
}

Carry LayeredModel::backward(int stage, const Weights& weights, const Gradients& gradients, const Carry& carry,
                             const Shared& shared, const Carry& d_out) const {
  Weights leaves;
  for (const torch::Tensor& weight : weights) leaves.push_back(weight.detach());
  return differentiate(leaves, gradients, carry, d_out,
                       [&](const Carry& inputs) { return forward(stage, leaves, inputs, shared, /*training=*/true); });
}

namespace {
[[noreturn]] void cannot_keep(int stage) {
  throw std::logic_error("stage " + std::to_string(stage) + " of the model keeps no activations");
}
}  // namespace

std::unique_ptr<KeptActivations> LayeredModel::forward_keeping(int stage, const Weights&, Carry&, const Shared&) const {
  cannot_keep(stage);
}
Carry LayeredModel::backward_kept(int stage, const Weights&, const Gradients&, const Carry&, const Shared&,
                                  const Carry&, std::unique_ptr<KeptActivations>) const {
  cannot_keep(stage);
}
std::unique_ptr<KeptActivations> LayeredModel::restore(int stage, const Weights&, const Carry&, const Shared&,
                                                       std::vector<torch::Tensor>) const {
  cannot_keep(stage);
}

Carry LayeredModel::differentiate(const Weights& leaves, const Gradients& gradients, const Carry& carry,
                                  const Carry& d_out, const std::function<Carry(const Carry&)>& forward) {
  const torch::AutoGradMode grad(true);
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    const bool wanted = gradients.wants(static_cast<int>(i));
    leaves[i].requires_grad_(wanted);
    if (wanted)
      torch::autograd::impl::set_post_acc_grad_hooks(leaves[i], std::make_unique<AddAndRelease>(gradients[i]));
  }
  Carry inputs;
  for (const torch::Tensor& part : carry) {
    inputs.push_back(part.detach());
    if (part.is_floating_point()) inputs.back().requires_grad_();
  }
  {
    const Carry out = forward(inputs);
    std::vector<torch::Tensor> roots, d_roots;
    for (std::size_t i = 0; i < out.size(); ++i) {
      if (i >= d_out.size() || !d_out[i].defined() || !out[i].requires_grad()) continue;
      roots.push_back(out[i]);
      d_roots.push_back(d_out[i]);
    }
    if (!roots.empty()) torch::autograd::backward(roots, d_roots);
  }
  Carry d_carry;
  for (const torch::Tensor& part : inputs) {
    if (!part.requires_grad()) {
      d_carry.emplace_back();
    } else {
      d_carry.push_back(part.grad().defined() ? part.grad() : torch::zeros_like(part));
    }
  }
  return d_carry;
}

Carry taken_by_backward(const StageSpec& stage, const Carry& input) {
  if (stage.backward_parts.empty()) return input;
  Carry taken;
  for (const int part : stage.backward_parts) taken.push_back(input.at(static_cast<std::size_t>(part)));
  return taken;
}

Carry joined(const std::vector<Carry>& carries) {
  std::vector<torch::Tensor> rows;
  for (const Carry& carry : carries) {
    if (carry.size() != 1) throw std::logic_error("more than hidden states pass to a stage of several micro-batches");
    rows.push_back(carry.front().reshape({-1, carry.front().size(-1)}));
  }
  return {torch::cat(rows)};
}

std::vector<Carry> apart(const Carry& carry, const std::vector<torch::Tensor>& ids) {
  if (carry.size() != 1) throw std::logic_error("more than hidden states pass from a stage of several micro-batches");
  std::vector<Carry> parts;
  std::int64_t row = 0;
  for (const torch::Tensor& of : ids) {
    std::vector<std::int64_t> shape = of.sizes().vec();
    shape.push_back(carry.front().size(-1));
    parts.push_back({carry.front().narrow(0, row, of.numel()).clone().view(shape)});
    row += of.numel();
  }
  return parts;
}

std::unique_ptr<LayeredModel> make_model(ModelSpec spec) {
  return models::make_decoder(std::move(spec));
}

}  // namespace tierflow

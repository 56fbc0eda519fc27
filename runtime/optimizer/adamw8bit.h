#pragma once
// FRONT DOOR of optimizer. AdamW with 8-bit blockwise moments (Dettmers et al. 2022, arXiv:2110.02861) as a
// torch::optim::Optimizer, for LibTorch loops whose model fits in memory. It is the update of streamed training.
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <tuple>
#include <vector>

namespace tierflow {

// The options of all parameters, or of one parameter group.
struct AdamW8bitOptions : torch::optim::OptimizerCloneableOptions<AdamW8bitOptions> {
  AdamW8bitOptions(double lr = 1e-3) : lr_(lr) {}  // NOLINT(google-explicit-constructor): as torch's own
  using betas_t = std::tuple<double, double>;
  TORCH_ARG(double, lr) = 1e-3;
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  TORCH_ARG(double, eps) = 1e-8;
  TORCH_ARG(double, weight_decay) = 1e-2;         // decoupled
  TORCH_ARG(std::int64_t, min_8bit_size) = 4096;  // parameters with fewer elements keep 32-bit moments

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr(); }
  void set_lr(double value) override { lr(value); }
};

// The state of one parameter of n elements. With 8 bits, exp_avg and exp_avg_sq are codes, uint8 [n], and absmax and
// absmax_sq have an fp32 number for each 256 elements. Otherwise exp_avg and exp_avg_sq are fp32 [n], and absmax and
// absmax_sq are undefined.
struct AdamW8bitParamState : torch::optim::OptimizerCloneableParamState<AdamW8bitParamState> {
  TORCH_ARG(std::int64_t, step) = 0;
  TORCH_ARG(torch::Tensor, exp_avg);
  TORCH_ARG(torch::Tensor, exp_avg_sq);
  TORCH_ARG(torch::Tensor, absmax);
  TORCH_ARG(torch::Tensor, absmax_sq);
  TORCH_ARG(torch::Tensor, master_low);  // int16 [n], of a bf16 parameter: with it an exact fp32 master

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

// Parameters must be contiguous tensors on the CPU or a CUDA device, fp32 or bf16. Gradients must be dense; they are
// rounded to bf16 before use. For anything else step() throws Exception (kind usage). The result depends neither on the
// number of threads nor on the device. On a CUDA device the work is enqueued on torch's current stream, and step()
// waits once, to learn whether all gradients are finite.
class AdamW8bit : public torch::optim::Optimizer {
 public:
  explicit AdamW8bit(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                     const AdamW8bitOptions& defaults = {});
  explicit AdamW8bit(std::vector<torch::Tensor> parameters, const AdamW8bitOptions& defaults = {})
      : AdamW8bit({torch::optim::OptimizerParamGroup(std::move(parameters))}, defaults) {}

  // If a gradient is not finite, the whole step is skipped: no parameter and no state changes.
  torch::Tensor step(LossClosure closure = nullptr) override;
  std::int64_t skipped_steps() const { return skipped_; }

  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  std::int64_t skipped_ = 0;
};

}  // namespace tierflow

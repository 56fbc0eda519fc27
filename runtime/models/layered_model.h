#pragma once
// FRONT DOOR of models. A model as a session uses it: stages that turn a carry into a carry, given the weights of their
// units. The weights are views of device memory that is used again for the next layer, so nothing here may keep a
// weight, or a graph that saved one, beyond the call.
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "runtime/models/attention.h"
#include "runtime/models/gradients.h"
#include "runtime/models/micro_batch.h"
#include "runtime/models/random_numbers.h"
#include "runtime/models/router_balance.h"
#include "runtime/models/soft_targets.h"
#include "runtime/models/token_scale.h"
#include "runtime/spec/model_spec.h"

namespace tierflow {

// What flows from layer to layer; element 0 is the hidden states [micro-batch, sequence, hidden], bf16.
using Carry = std::vector<torch::Tensor>;
// Weights of a stage: the tensors of its units in UnitSpec order, unit after unit; bf16 in the model, in the
// checkpoint's shapes.
using Weights = std::vector<torch::Tensor>;
// The tensor at a position that a TensorIndex gave.
inline const torch::Tensor& at_position(const std::vector<torch::Tensor>& tensors, int position) {
  return tensors[static_cast<std::size_t>(position)];
}
inline const torch::Tensor& at_position(const Gradients& sums, int position) {
  return sums[static_cast<std::size_t>(position)];
}

// Keys and values of sequences that are being generated (key_value_cache.h).
class KeyValueCache;

// Tokens [begin, begin + length) of a row: they continue a sequence that has `before` tokens in the cache.
struct CachedSpan {
  std::int64_t sequence = 0, begin = 0, length = 0, before = 0;
};

// What a pass of generation takes: tokens of sequences, one span after the other.
struct CachedRow {
  torch::Tensor ids;  // [1, tokens] int64
  std::vector<CachedSpan> spans;
  KeyValueCache* cache = nullptr;
  std::int64_t context = 0;  // the most tokens that its sequences will have: rotary factors may depend on it (LongRoPE)
};

// By block with experts: of each expert, whether a token took it.
using ExpertsTouched = std::map<std::int64_t, std::vector<bool>>;

// What is told of each routing. Null: nobody wants to know.
struct RouterWatch {
  ExpertsTouched* touched = nullptr;  // hears of every forward
  // Of the micro-batches that a computation takes, in training with the load-balancing loss; the backward takes it too.
  models::RouterBalance* balance = nullptr;
};

// What several layers read, the same for every layer of one micro-batch.
struct Shared {
  torch::Tensor ids, labels;
  std::vector<torch::Tensor> tables = {};  // rotary cos and sin, masks: the model's own
  // For packed rows, as in MicroBatch. Undefined and empty if each row is one document.
  torch::Tensor positions = {};
  std::vector<Document> documents = {};
  torch::Tensor ends = {};  // where each document begins among all tokens, and the end: int32 [documents + 1]
  // As in CachedRow; null and empty outside of generation.
  KeyValueCache* cache = nullptr;
  std::vector<CachedSpan> spans = {};
  // Further input of the head: a teacher's targets in training, and in an evaluation how many of each position's most
  // likely tokens are wanted.
  models::SoftTargets teacher = {};
  std::int64_t top = 0;
  models::AttentionChoice attention = {};
  RouterWatch watch = {};
  // Tokens of the longest document, those in the cache included.
  std::int64_t longest() const;
};
// A micro-batch on `device`, without tables; the host does not wait for the copy (upload.h). Throws as
// MicroBatch::documents() does.
Shared shared_of(const MicroBatch& batch, torch::Device device);
Shared shared_of(const CachedRow& row, torch::Device device);

// The result of a forward of the head. For your own Layers the tensors are undefined.
struct HeadScores {
  double loss_sum = 0;   // over the tokens that count, natural log, summed in double
  torch::Tensor losses;  // of each token [tokens] fp64; 0 where no label counts
  // [tokens] bool: whether the label has the greatest logit, or is the first of several greatest; false where no label
  // counts.
  torch::Tensor hits;
  // Each token's most likely Shared::top tokens [tokens, top]: ids int32 in the order of top_logits.h, and their
  // log-probabilities fp64, natural log. Without meaning where no label counts; undefined if Shared::top is 0.
  torch::Tensor top_ids = {}, top_log_probabilities = {};
  // As `losses`, of the model without its adapters. Defined in a session whose loss computes its reference.
  torch::Tensor reference_losses = {};
};

// The sums are fp64 tensors on the device of the carry, added up in an order that only shapes decide. Reading one waits
// for the device.
struct HeadResult {
  torch::Tensor loss_sum = {};  // over the tokens that count, natural log
  Carry d_carry = {};           // gradient of the sum of each token's loss times its scale
  // With a teacher: the sums whose weighted sum is loss_sum (soft_targets.h).
  torch::Tensor ce_sum = {}, kd_sum = {};
};

// What a forward leaves on the device so that its backward need not compute it again. It contains no weight.
class KeptActivations {
 public:
  virtual ~KeptActivations() = default;
  // Tensors from which the model can restore all others without a matrix product or attention. If the device has no
  // room, only these are swapped. For one stage and carries of one shape, their number and shapes are always the same.
  virtual std::vector<torch::Tensor> essentials() const = 0;
};

// The forward of a stage with units on demand, for one micro-batch. It begins with the stage's own units; then it is
// given each unit that it needs, in ascending order.
class StageInParts {
 public:
  virtual ~StageInParts() = default;
  // Positions in StageSpec::on_demand, ascending.
  virtual std::vector<int> needed() const = 0;
  // weights: of the unit at that position only.
  virtual void add(int position, const Weights& weights) = 0;
  // Call it after add() for every needed unit.
  virtual Carry finish() = 0;
};

class LayeredModel {
 public:
  virtual ~LayeredModel() = default;
  virtual const ModelSpec& spec() const = 0;
  // Tables are computed on `device`.
  virtual Shared share(const MicroBatch& batch, torch::Device device) const = 0;

  // Embedding (the carry is empty) and blocks. Differentiable if autograd is on. `training` turns dropout on; random
  // numbers are those of models::Seeded, which the session makes with a seed of (seed, step, micro-batch, stage) for
  // each call, even when it recomputes.
  virtual Carry forward(int stage, const Weights& weights, const Carry& carry, const Shared& shared,
                        bool training) const = 0;

  // Takes the place of forward() for a stage with units on demand, without gradients and dropout. weights: of its own
  // units. By default, and for other stages, throws std::logic_error.
  virtual std::unique_ptr<StageInParts> begin(int stage, const Weights& weights, const Carry& carry,
                                              const Shared& shared) const;

  // Adds the gradient of every weight to `gradients` and returns the gradient of the stage's input (empty for the
  // embedding). `carry` holds those tensors of the input that taken_by_backward() gives.
  // Default: recompute with autograd on from `carry`, differentiate, release each bf16 gradient as soon as it is added.
  virtual Carry backward(int stage, const Weights& weights, const Gradients& gradients, const Carry& carry,
                         const Shared& shared, const Carry& d_out) const;

  // For stages that can keep their activations. forward_keeping() is forward() in training, with the same carry bit for
  // bit. backward_kept() is backward() without the recomputation, with the same gradients bit for bit.
  virtual bool can_keep(int /*stage*/) const { return false; }
  virtual std::unique_ptr<KeptActivations> forward_keeping(int stage, const Weights& weights, Carry& carry,
                                                           const Shared& shared) const;
  virtual Carry backward_kept(int stage, const Weights& weights, const Gradients& gradients, const Carry& carry,
                              const Shared& shared, const Carry& d_out, std::unique_ptr<KeptActivations> kept) const;
  // Restores from its essentials what forward_keeping() made from `carry`, bit for bit. The result uses their memory.
  virtual std::unique_ptr<KeptActivations> restore(int stage, const Weights& weights, const Carry& carry,
                                                   const Shared& shared, std::vector<torch::Tensor> essentials) const;

  // Bytes of what stages read besides weights and their input and what stays in device memory while the model lives.
  virtual std::uint64_t constant_bytes() const { return 0; }

  // What forward() and the head draw when training.
  virtual models::Draws draws() const { return models::Draws::torchs; }

  // The head: final norm, logits and loss, in chunks whose size only shapes decide, so that the logits never exist as a
  // whole.
  virtual HeadScores head_scores(const Weights& weights, const Carry& carry, const Shared& shared) const = 0;
  virtual HeadResult head_loss_and_backward(const Weights& weights, const Gradients& gradients, const Carry& carry,
                                            const Shared& shared, const models::TokenScale& scale) const = 0;

  // Generation: share_cached() of a row, forward() of every stage but the last, then next_logits(): the logits of the
  // token after each span [spans, vocab]. By default, which is for models that cannot generate, they throw Exception
  // (kind usage).
  virtual Shared share_cached(const CachedRow& row, torch::Device device) const;
  virtual torch::Tensor next_logits(const Weights& weights, const Carry& carry, const Shared& shared) const;

 protected:
  // What backward() does: runs `forward` on a copy of `carry` with autograd on, differentiates towards `leaves` and the
  // carry, and moves each leaf's gradient into its sum as soon as it is complete. Leaves without a defined gradient are
  // constants.
  static Carry differentiate(const Weights& leaves, const Gradients& gradients, const Carry& carry, const Carry& d_out,
                             const std::function<Carry(const Carry&)>& forward);
};

// For stages that take several micro-batches together: joined() makes [tokens, hidden] of their hidden states or
// gradients, and apart() separates them again by the ids of each. Such a stage gets and gives no other tensors.
Carry joined(const std::vector<Carry>& carries);
std::vector<Carry> apart(const Carry& carry, const std::vector<torch::Tensor>& ids);

// Those tensors of a stage's input that its backward takes. Only they are saved.
Carry taken_by_backward(const StageSpec& stage, const Carry& input);

// The model of a specification: one of the families of model_spec.h.
std::unique_ptr<LayeredModel> make_model(ModelSpec spec);

}  // namespace tierflow

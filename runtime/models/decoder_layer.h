#pragma once
// Single layers of a transformers model, for a client that drives the model itself: forward without a graph, and a
// backward by hand that adds gradients of weights directly to their sums. What one backward adds to a sum is a bf16
// value. So sums over micro-batches have the same bits wherever they are computed.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "runtime/models/layered_model.h"

namespace tierflow::models {

// A decoder layer of a model that model_spec.h reads, but for mixtures of experts and layers that scale their queries
// by their position: causal, no dropout.
class DecoderLayer {
 public:
  // The classes of dense decoders that model_spec.h reads, as config.json names them.
  static std::vector<std::string> architectures();

  // The adapter of one linear layer: A [rank, in] and B [out, rank] are among the weights as MODULE.lora_A.weight and
  // MODULE.lora_B.weight.
  struct Adapter {
    std::string module;  // within the layer: "self_attn.q_proj"
    std::int64_t rank = 0;
    double scale = 1;
  };

  // config: of the whole model; layer: counts from 0. roles: what the weights of each call are, in their order, as
  // transformers names them within the layer ("self_attn.q_proj.weight"). dropout: of what adapters take; forward() and
  // backward() draw it from the default generator, in the same state, and nothing can be kept.
  // Throws Exception (kind usage or input) if the config has no such layer, or the roles are not the layer's.
  DecoderLayer(const ModelConfig& config, std::int64_t layer, const std::vector<std::string>& roles,
               const std::vector<Adapter>& adapters = {}, double dropout = 0);

  // What a caller needs to know to pass a model's own tables and masks.
  struct Form {
    std::int64_t window = 0;   // keys that a query sees, itself among them; 0: all before it
    std::int64_t rotated = 0;  // of a head's dimensions; 0: none, and the tables are not looked at
    bool interleaved = false;  // pairs are neighbours; else one of each half
    bool rounded = true;       // tables are bf16; else fp32
    bool keeps = true;         // forward() can keep
  };
  const Form& form() const { return form_; }

  // A call's tensors. hidden: bf16 [batch, sequence, hidden]; cos, sin: [sequence, rotated / 2], or with the batch
  // before that.
  struct Input {
    at::Tensor hidden, cos, sin;
    std::vector<Document> documents = {};  // of packed rows, as MicroBatch::documents() gives them
  };
  // `kept`, where wanted: what backward() then need not compute again. The result's bits are the same.
  at::Tensor forward(const Weights& weights, const Input& input,
                     std::unique_ptr<KeptActivations>* kept = nullptr) const;
  // The gradient of `hidden` from that of the result; adds the weights' to `sums` (fp32, undefined where unwanted).
  at::Tensor backward(const Weights& weights, const Gradients& sums, const Input& input, const at::Tensor& d_out,
                      std::unique_ptr<KeptActivations> kept) const;
  // Bytes of what forward() keeps; where it cannot keep, of what a backward has of its own at once, about.
  std::uint64_t kept_bytes(std::int64_t tokens) const;

 private:
  std::vector<at::Tensor> in_order(const std::vector<at::Tensor>& tensors) const;

  Form form_;
  std::uint64_t token_bytes_ = 0;  // kept of each token
  std::unique_ptr<LayeredModel> model_;
  int stage_ = 0;
  bool by_hand_ = true;             // its gradient; else autograd's
  std::vector<std::size_t> order_;  // position in a call's weights, by position in the model's
  std::vector<bool> products_;      // by that: whether its gradient is a matrix product
};

// y = x W^T + b, x [.., in], d_y [.., out]: the gradient of x; adds those of W and b. Undefined sums are unwanted.
at::Tensor linear_backward(const at::Tensor& weight, const at::Tensor& weight_sum, const at::Tensor& bias_sum,
                           const at::Tensor& x, const at::Tensor& d_y);
// Adds the gradient of rows `ids` of a table from that of the rows, d [.., width]; `padding` gets none.
void embedding_backward(const at::Tensor& sum, const at::Tensor& ids, const at::Tensor& d, std::int64_t padding);

// Softmax cross-entropy over logits, bf16 [tokens, vocab], and labels [tokens], negative where none counts: the sum of
// the losses (a number of their device, fp64), and the gradient of scale times that sum.
at::Tensor cross_entropy_sum(const at::Tensor& logits, const at::Tensor& labels);
at::Tensor cross_entropy_gradient(const at::Tensor& logits, const at::Tensor& labels, double scale);

}  // namespace tierflow::models

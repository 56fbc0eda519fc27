#pragma once
// How the blocks of decoders differ between families: the values from their config.json, and the names of their
// tensors.
#include <cstdint>
#include <string>
#include <vector>

namespace tierflow {

// rms: rounded to the model's type before the weight (Llama). rms_wide: the weight in fp32, then rounded (OLMo 2).
// rms_plus_one: the same with 1 + weight (Gemma). layer: with weight and bias. layer_no_bias: with weight alone.
// layer_plus_one: with 1 + weight, rounded to the model's type, and bias (Nemotron).
enum class NormKind : std::uint8_t { none, rms, rms_wide, rms_plus_one, layer, layer_no_bias, layer_plus_one };
constexpr bool subtracts_mean(NormKind kind) {
  return kind >= NormKind::layer;
}
constexpr bool has_bias(NormKind kind) {
  return kind == NormKind::layer || kind == NormKind::layer_plus_one;
}

// Norms of q and k: none; of each head; of each head with weights of its own, [heads, head_dim]; of all heads together;
// of each head after the rotary embedding, where the others come before it; the same without weights, in layers with a
// rotary embedding.
enum class QkNorm : std::uint8_t { none, head, own, whole, head_rotated, rotated_unweighted };

// relu2: the square of relu.
enum class Activation : std::uint8_t { silu, gelu, gelu_tanh, relu, relu2 };

// Rotary embedding as in transformers' rope utilities: "default", "linear", "llama3", "yarn", "longrope".
struct RopeSpec {
  double theta = 10000.0;
  std::string type = "default";
  double partial = 1.0;      // the share of a head's dimensions that rotate, the first ones
  bool interleaved = false;  // pairs are neighbours; else one of each half
  bool rounded = true;       // cos and sin are rounded to the model's type
  double factor = 1.0;
  double attention_factor = 1.0;                         // of cos and sin
  double low_freq_factor = 1.0, high_freq_factor = 4.0;  // llama3
  std::int64_t original_max_positions = 0;               // llama3, yarn, longrope
  double beta_fast = 32.0, beta_slow = 1.0;              // yarn
  bool truncate = true;                                  // yarn
  // longrope, one for each pair: rows of more than original_max_positions tokens take the long ones.
  std::vector<double> short_factors = {}, long_factors = {};
  std::int64_t rotated(std::int64_t head_dim) const {
    return static_cast<std::int64_t>(static_cast<double>(head_dim) * partial);
  }
};

// q times 1 + strength log(1 + floor((position + offset) / period)); strength 0: not.
struct QueryScaling {
  double strength = 0;
  std::int64_t period = 0, offset = 0;
  bool rounded = true;        // the factors are rounded to the model's type
  bool without_rope = false;  // in layers without a rotary embedding alone
};

// Where a layer differs from its neighbours.
struct LayerSpec {
  std::int64_t window = 0;  // keys that a query sees, itself among them; 0: all before it
  // Sequences are cut at multiples of it, and a query sees the keys of its part alone; 0: they are not. Not beside a
  // window.
  std::int64_t chunk = 0;
  int rope = 0;          // of ModelConfig::ropes; -1: none
  bool experts = false;  // its MLP is a mixture of experts
  // The most keys that a query sees; 0: all before it.
  std::int64_t reach() const { return window > 0 ? window : chunk; }
};

// If sharpness > 0, the MLP of gpt-oss: (clamp(up, -limit, limit) + 1) g sigmoid(sharpness g) with g = min(gate,
// limit). Else the model's activation(gate) up.
struct ClampedGate {
  double sharpness = 0, limit = 0;
};

// A mixture of experts: each token takes the `per_token` experts (MLPs) with the highest scores among the `count` of a
// layer; if scores are equal, those that come first. y = shared(x) + sum of weight * expert(x), summed in fp32: first
// the shared expert, then the others from the first to the last. With weights_of_input the sum is that of
// expert(weight * x).
struct ExpertsSpec {
  std::int64_t count = 0, per_token = 0;
  std::int64_t width = 0;         // intermediate size of one expert
  std::int64_t shared_width = 0;  // intermediate size of the expert that every token takes; 0: there is none
  bool shared_gate = false;  // the shared expert's result is multiplied with the sigmoid of a linear layer of its own
  bool normalised = false;   // a token's weights, the scores of its experts, sum to 1
  bool sigmoid = false;      // scores are sigmoids; else a softmax over all experts
  bool wide = false;         // the router's product is fp32
  bool corrected = false;    // to choose experts, a number that is not trained is added to each score
  // Neighbouring experts form `groups` groups. The `groups_taken` groups with the highest sums of their two best scores
  // are taken; no expert of another group is chosen.
  std::int64_t groups = 1, groups_taken = 1;
  double scale = 1;     // of the weights
  double balance = 0;   // times what the load-balancing loss adds to that of the tokens (models/router_balance.h)
  bool rounded = true;  // weights are rounded to the model's type
  bool biases = false;  // of the router's product and of those of the experts
  bool weights_of_input = false;
  bool transposed = false, by_turns = false;  // how the experts' matrices are stacked (DecoderNames)
  ClampedGate clamped;
};

// The names of a family's tensors. Empty: it has no such tensor.
struct DecoderNames {
  std::string prefix = "model.", tokens = "embed_tokens.weight", norm = "model.norm", head = "lm_head.weight";
  std::string positions = {};      // learned ones, beside `tokens`
  std::string layers = "layers.";  // of one layer, before its number
  // Of one layer. qkv and gate_up are products of several in one, rows of q first, or of gate, unless ModelConfig says
  // otherwise (qkv_by_head, up_first). Without mlp_norm the MLP of a parallel block takes what the attention takes.
  std::string q = "self_attn.q_proj", k = "self_attn.k_proj", v = "self_attn.v_proj", qkv = {};
  std::string o = "self_attn.o_proj", q_norm = "self_attn.q_norm", k_norm = "self_attn.k_norm";
  std::string sinks = {};  // a logit of each head that its softmax counts beside those of the keys
  std::string gate = "mlp.gate_proj", up = "mlp.up_proj", gate_up = {}, down = "mlp.down_proj";
  // Norms of a half's input, and of what it adds.
  std::string attention_norm = "input_layernorm", attention_out_norm = {};
  std::string mlp_norm = "post_attention_layernorm", mlp_out_norm = {};
  // Of layers with experts. Expert e's matrices are expert.e.expert_gate and so on; where stacked_in is given, all of a
  // layer lie in two: stacked_in [experts, 2 width, hidden], rows of gate first, and stacked_down [experts, hidden,
  // width]. Transposed they are [experts, hidden, 2 width], columns of gate first, or of gate and up by turns, and
  // [experts, width, hidden]. Their biases, [experts, 2 width] and [experts, hidden], are called the same and _bias.
  std::string router = "mlp.gate", expert = "mlp.experts", stacked_in = {}, stacked_down = {};
  std::string expert_gate = "gate_proj", expert_up = "up_proj", expert_down = "down_proj";
  std::string shared = "mlp.shared_expert", shared_gate = "mlp.shared_expert_gate";
};

}  // namespace tierflow

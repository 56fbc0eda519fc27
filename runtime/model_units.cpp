#include "runtime/model_units.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace tierflow {
namespace {

// Collects the tensors of one unit in the order of the model's code; take() puts matrices before norms and biases.
class UnitBuilder {
 public:
  UnitBuilder(std::string name, std::string prefix, double std)
      : unit_{.name = std::move(name)}, prefix_(std::move(prefix)), std_(std) {}

  void matrix(const std::string& role, std::int64_t rows, std::int64_t columns) { matrix(role, rows, columns, std_); }
  void matrix(const std::string& role, std::int64_t rows, std::int64_t columns, double std) {
    unit_.tensors.push_back({.name = prefix_ + role, .role = role, .shape = {rows, columns}, .init_std = std});
  }
  void embedding(const std::string& role, std::int64_t rows, std::int64_t columns) {
    matrix(role, rows, columns);
    unit_.tensors.back().moments_32 = true;
  }
  void bias(const std::string& role, std::int64_t size) { vector(role, size, Init::zeros); }
  void rms_norm(const std::string& role, std::int64_t size) { vector(role + ".weight", size, Init::ones); }
  void layer_norm(const std::string& role, std::int64_t size) {
    vector(role + ".weight", size, Init::ones);
    vector(role + ".bias", size, Init::zeros);
  }
  // A torch.nn.Linear: weight [out, in].
  void linear(const std::string& role, std::int64_t out, std::int64_t in, bool with_bias) {
    matrix(role + ".weight", out, in);
    if (with_bias) bias(role + ".bias", out);
  }
  // GPT-2's Conv1D: weight [in, out].
  void conv1d(const std::string& role, std::int64_t out, std::int64_t in, double std) {
    matrix(role + ".weight", in, out, std);
    bias(role + ".bias", out);
  }

  UnitSpec take() {
    std::stable_partition(unit_.tensors.begin(), unit_.tensors.end(),
                          [](const TensorSpec& tensor) { return tensor.shape.size() > 1; });
    return std::move(unit_);
  }

 private:
  void vector(const std::string& role, std::int64_t size, Init init) {
    unit_.tensors.push_back({.name = prefix_ + role,
                             .role = role,
                             .shape = {size},
                             .init = init,
                             .init_std = 0,
                             .decays = false,
                             .moments_32 = true});
  }

  UnitSpec unit_;
  std::string prefix_;
  double std_;
};

std::string layer_name(std::int64_t layer) {
  return "layers." + std::to_string(layer);
}

void build_llama(ModelSpec& spec) {
  const ModelConfig& c = spec.config;
  const double std = c.initializer_range;
  UnitBuilder embedding("embedding", "model.", std);
  embedding.embedding("embed_tokens.weight", c.vocab_size, c.hidden_size);
  spec.units.push_back(embedding.take());
  for (std::int64_t i = 0; i < c.layers; ++i) {
    UnitBuilder block(layer_name(i), "model." + layer_name(i) + ".", std);
    block.linear("self_attn.q_proj", c.heads * c.head_dim, c.hidden_size, c.qkv_bias);
    block.linear("self_attn.k_proj", c.kv_heads * c.head_dim, c.hidden_size, c.qkv_bias);
    block.linear("self_attn.v_proj", c.kv_heads * c.head_dim, c.hidden_size, c.qkv_bias);
    block.linear("self_attn.o_proj", c.hidden_size, c.heads * c.head_dim, c.output_bias);
    if (c.qk_norm) {
      block.rms_norm("self_attn.q_norm", c.head_dim);
      block.rms_norm("self_attn.k_norm", c.head_dim);
    }
    block.linear("mlp.gate_proj", c.intermediate_size, c.hidden_size, c.mlp_bias);
    block.linear("mlp.up_proj", c.intermediate_size, c.hidden_size, c.mlp_bias);
    block.linear("mlp.down_proj", c.hidden_size, c.intermediate_size, c.mlp_bias);
    block.rms_norm("input_layernorm", c.hidden_size);
    block.rms_norm("post_attention_layernorm", c.hidden_size);
    spec.units.push_back(block.take());
  }
  UnitBuilder head("head", "", std);
  if (!c.tie_word_embeddings) head.matrix("lm_head.weight", c.vocab_size, c.hidden_size);
  head.rms_norm("model.norm", c.hidden_size);
  spec.units.push_back(head.take());
}

void build_gpt2(ModelSpec& spec) {
  const ModelConfig& c = spec.config;
  const double std = c.initializer_range;
  // Two projections a block end on the residual path.
  const double residual_std = std / std::sqrt(2.0 * static_cast<double>(c.layers));
  UnitBuilder embedding("embedding", "transformer.", std);
  embedding.embedding("wte.weight", c.vocab_size, c.hidden_size);
  embedding.embedding("wpe.weight", c.max_positions, c.hidden_size);
  spec.units.push_back(embedding.take());
  for (std::int64_t i = 0; i < c.layers; ++i) {
    UnitBuilder block(layer_name(i), "transformer.h." + std::to_string(i) + ".", std);
    block.layer_norm("ln_1", c.hidden_size);
    block.conv1d("attn.c_attn", 3 * c.hidden_size, c.hidden_size, std);
    block.conv1d("attn.c_proj", c.hidden_size, c.hidden_size, residual_std);
    block.layer_norm("ln_2", c.hidden_size);
    block.conv1d("mlp.c_fc", c.intermediate_size, c.hidden_size, std);
    block.conv1d("mlp.c_proj", c.hidden_size, c.intermediate_size, residual_std);
    spec.units.push_back(block.take());
  }
  UnitBuilder head("head", "", std);
  if (!c.tie_word_embeddings) head.matrix("lm_head.weight", c.vocab_size, c.hidden_size);
  head.layer_norm("transformer.ln_f", c.hidden_size);
  spec.units.push_back(head.take());
}

void build_opt(ModelSpec& spec) {
  const ModelConfig& c = spec.config;
  const double std = c.initializer_range;
  UnitBuilder embedding("embedding", "model.decoder.", std);
  embedding.embedding("embed_tokens.weight", c.vocab_size, c.hidden_size);
  embedding.embedding("embed_positions.weight", c.max_positions + c.position_offset, c.hidden_size);
  spec.units.push_back(embedding.take());
  for (std::int64_t i = 0; i < c.layers; ++i) {
    UnitBuilder block(layer_name(i), "model.decoder." + layer_name(i) + ".", std);
    block.linear("self_attn.k_proj", c.hidden_size, c.hidden_size, c.qkv_bias);
    block.linear("self_attn.v_proj", c.hidden_size, c.hidden_size, c.qkv_bias);
    block.linear("self_attn.q_proj", c.hidden_size, c.hidden_size, c.qkv_bias);
    block.linear("self_attn.out_proj", c.hidden_size, c.hidden_size, c.output_bias);
    block.layer_norm("self_attn_layer_norm", c.hidden_size);
    block.linear("fc1", c.intermediate_size, c.hidden_size, c.mlp_bias);
    block.linear("fc2", c.hidden_size, c.intermediate_size, c.mlp_bias);
    block.layer_norm("final_layer_norm", c.hidden_size);
    spec.units.push_back(block.take());
  }
  UnitBuilder head("head", "", std);
  if (!c.tie_word_embeddings) head.matrix("lm_head.weight", c.vocab_size, c.hidden_size);
  if (c.norm_before) head.layer_norm("model.decoder.final_layer_norm", c.hidden_size);
  UnitSpec unit = head.take();
  if (!unit.tensors.empty()) spec.units.push_back(std::move(unit));
}

}  // namespace

void build_units(ModelSpec& spec) {
  switch (spec.config.family) {
    case Family::llama:
      build_llama(spec);
      break;
    case Family::gpt2:
      build_gpt2(spec);
      break;
    case Family::opt:
      build_opt(spec);
      break;
  }
  spec.stages.push_back({.kind = StageKind::embedding, .units = {0}});
  for (std::int64_t i = 0; i < spec.config.layers; ++i)
    spec.stages.push_back({.kind = StageKind::block, .block = i, .units = {static_cast<int>(i) + 1}});
  StageSpec head{.kind = StageKind::head};
  const int own = static_cast<int>(spec.config.layers) + 1;
  if (own < static_cast<int>(spec.units.size())) head.units.push_back(own);
  if (spec.config.tie_word_embeddings) head.units.push_back(0);
  spec.stages.push_back(std::move(head));
}

}  // namespace tierflow

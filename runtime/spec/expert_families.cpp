// What each family with mixtures of experts says in its config.json beside its attention, and where it is silent the
// defaults of its class in transformers.
#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "runtime/spec/config_limits.h"
#include "runtime/spec/decoder_fields.h"
#include "runtime/spec/families.h"
#include "runtime/spec/rope_config.h"

namespace tierflow {
namespace {

struct Defaults {
  std::int64_t count = 0, per_token = 0, width = 0;  // width 0: intermediate_size
  double balance = 0.001;                            // router_aux_loss_coef
};

// transformers calls their number otherwise by its version, in one class.
std::int64_t number_of_experts(const JsonFields& fields, std::int64_t fallback) {
  std::int64_t count = 0;
  for (const char* name : {"num_experts", "num_local_experts", "n_routed_experts"}) {
    const std::int64_t found = fields.integer_or(name, count, 1, limits::experts);
    if (count != 0 && found != count) fields.fail(name, fmt::format("is {}; by another name it is {}", found, count));
    count = found;
  }
  return count == 0 ? fallback : count;
}

void read_experts(const JsonFields& fields, ModelConfig& c, const Defaults& defaults) {
  ExpertsSpec& e = c.experts;
  e.count = number_of_experts(fields, defaults.count);
  e.per_token = fields.integer_or("num_experts_per_tok", defaults.per_token, 1, limits::experts);
  if (e.per_token > e.count)
    fields.fail("num_experts_per_tok", fmt::format("is {}, more than the {} experts", e.per_token, e.count));
  e.width = defaults.width == 0 ? c.intermediate_size
                                : fields.integer_or("moe_intermediate_size", defaults.width, 1, limits::intermediate);
  const double balance = fields.number_or("router_aux_loss_coef", defaults.balance, 0.0, 1e6);
  if (fields.boolean_or("output_router_logits", false)) e.balance = balance;
  if (c.layer_specs.empty()) c.layer_specs.resize(static_cast<std::size_t>(c.layers));
  for (LayerSpec& layer : c.layer_specs) layer.experts = true;
}

// Experts in every step-th layer.
void set_sparse_layers(const JsonFields& fields, ModelConfig& c, const char* step_field) {
  const std::int64_t step = fields.integer_or(step_field, 1, 1, limits::layers);
  for (std::int64_t i = 0; i < c.layers; ++i) c.layer_specs[static_cast<std::size_t>(i)].experts = (i + 1) % step == 0;
}

// The layers that a list names.
std::vector<std::size_t> layers_of(const JsonFields& fields, const ModelConfig& c, const char* name) {
  std::vector<std::size_t> layers;
  const Json* list = fields.find(name);
  if (list == nullptr) return layers;
  if (!list->is_array()) fields.fail(name, "must be a list of layers");
  for (const Json& layer : *list) {
    if (!layer.is_number_integer() || layer < 0 || layer >= c.layers)
      fields.fail(name, fmt::format("has an entry that is none of the layers 0 to {}", c.layers - 1));
    layers.push_back(layer.get<std::size_t>());
  }
  return layers;
}

// Qwen's: every decoder_sparse_step-th layer, but those of mlp_only_layers.
void read_sparse_layers(const JsonFields& fields, ModelConfig& c) {
  set_sparse_layers(fields, c, "decoder_sparse_step");
  for (const std::size_t dense : layers_of(fields, c, "mlp_only_layers")) c.layer_specs[dense].experts = false;
}

void read_mixtral(const JsonFields& fields, ModelConfig& c) {
  read_mistral(fields, c);
  if (fields.find("sliding_window") == nullptr) c.layer_specs.clear();
  c.ropes = {read_rope(fields, c, 1e6)};
  c.norm_eps = fields.number_or("rms_norm_eps", 1e-5, 0.0, 1.0);
  read_experts(fields, c, {.count = 8, .per_token = 2});
  c.experts.normalised = true;
  c.experts.rounded = false;
  c.names.router = "block_sparse_moe.gate";
  c.names.expert = "block_sparse_moe.experts";
  c.names.expert_gate = "w1";
  c.names.expert_up = "w3";
  c.names.expert_down = "w2";
  if (fields.number_or("router_jitter_noise", 0.0, 0.0, 1.0) != 0.0)
    fields.fail("router_jitter_noise", "other than 0 is not supported");
}

void read_qwen2_moe(const JsonFields& fields, ModelConfig& c) {
  require(fields, "use_sliding_window", false, false);
  read_qwen2(fields, c);
  c.qkv_bias = fields.boolean_or("qkv_bias", true);
  read_experts(fields, c, {.count = 60, .per_token = 4, .width = 1408});
  read_sparse_layers(fields, c);
  c.experts.normalised = fields.boolean_or("norm_topk_prob", false);
  c.experts.shared_width = fields.integer_or("shared_expert_intermediate_size", 5632, 1, limits::intermediate);
  c.experts.shared_gate = true;
}

void read_qwen3_moe(const JsonFields& fields, ModelConfig& c) {
  require(fields, "use_sliding_window", false, false);
  read_qwen3(fields, c);
  read_experts(fields, c, {.count = 128, .per_token = 8, .width = 768});
  read_sparse_layers(fields, c);
  c.experts.normalised = fields.boolean_or("norm_topk_prob", false);
}

void read_olmoe(const JsonFields& fields, ModelConfig& c) {
  read_llama(fields, c);
  c.norm_eps = fields.number_or("rms_norm_eps", 1e-5, 0.0, 1.0);
  read_experts(fields, c, {.count = 64, .per_token = 8, .balance = 0.01});
  c.experts.normalised = fields.boolean_or("norm_topk_prob", false);
  c.qk_norm = QkNorm::whole;
  if (fields.find("clip_qkv") != nullptr) fields.fail("clip_qkv", "is not supported");
}

// GLM-4.5, 4.6 and 4.7, Air among them. Its layers for predicting several tokens at once are not read, nor does
// transformers.
void read_glm4_moe(const JsonFields& fields, ModelConfig& c) {
  read_glm(fields, c);
  fields.know({"num_nextn_predict_layers", "num_mtp_layers"});
  c.norm_eps = fields.number_or("rms_norm_eps", 1e-5, 0.0, 1.0);
  c.ropes[0].interleaved = false;
  c.names.gate = "mlp.gate_proj";
  c.names.up = "mlp.up_proj";
  c.names.gate_up.clear();
  c.qkv_bias = fields.boolean_or("attention_bias", false);
  if (fields.boolean_or("use_qk_norm", false)) c.qk_norm = QkNorm::head;
  read_experts(fields, c, {.count = 128, .per_token = 8, .width = 1408});
  ExpertsSpec& e = c.experts;
  e.sigmoid = e.wide = e.corrected = true;
  e.balance = 0;  // output_router_logits adds no loss in its class
  e.rounded = false;
  e.normalised = fields.boolean_or("norm_topk_prob", true);
  e.scale = fields.number_or("routed_scaling_factor", 1.0, 1e-6, 1e6);
  e.groups = fields.integer_or("n_group", 1, 1, e.count);
  e.groups_taken = fields.integer_or("topk_group", 1, 1, e.groups);
  if (e.count % e.groups != 0) fields.fail("n_group", fmt::format("is {}, of {} experts", e.groups, e.count));
  if (e.per_token > e.count / e.groups * e.groups_taken)
    fields.fail("num_experts_per_tok", fmt::format("is {}, more than the experts of topk_group groups", e.per_token));
  e.shared_width = e.width * fields.integer_or("n_shared_experts", 1, 1, 64);
  c.names.shared = "mlp.shared_experts";
  const std::int64_t dense = fields.integer_or("first_k_dense_replace", 1, 0, limits::layers);
  for (std::int64_t i = 0; i < std::min(dense, c.layers); ++i)
    c.layer_specs[static_cast<std::size_t>(i)].experts = false;
}

void read_granite_moe(const JsonFields& fields, ModelConfig& c) {
  read_granite(fields, c);
  read_experts(fields, c, {.count = 8, .per_token = 2});
  c.experts.normalised = true;
  c.names.router = "block_sparse_moe.router.layer";
  c.names.stacked_in = "block_sparse_moe.input_linear.weight";
  c.names.stacked_down = "block_sparse_moe.output_linear.weight";
}

void read_gpt_oss(const JsonFields& fields, ModelConfig& c) {
  read_gpt_oss_attention(fields, c);
  read_experts(fields, c, {.count = 128, .per_token = 4});
  ExpertsSpec& e = c.experts;
  e.normalised = true;  // a softmax over the chosen logits alone
  e.biases = e.transposed = e.by_turns = true;
  e.clamped = {.sharpness = fields.number_or("swiglu_alpha", 1.702, 1e-6, 1e6),
               .limit = fields.number_or("swiglu_limit", 7.0, 1e-6, 1e6)};
  c.names.router = "mlp.router";
  c.names.stacked_in = "mlp.experts.gate_up_proj";
  c.names.stacked_down = "mlp.experts.down_proj";
}

// Layers with a rotary embedding attend in chunks, those without to all, unless layer_types says otherwise.
void read_llama4_attention(const JsonFields& fields, ModelConfig& c) {
  c.ropes = {read_rope(fields, c, 500000.0)};
  c.ropes[0].interleaved = true;
  c.ropes[0].rounded = false;
  bias_of_attention(fields, c);
  if (fields.boolean_or("use_qk_norm", true)) c.qk_norm = QkNorm::rotated_unweighted;
  const Json* tuned = fields.find("attn_temperature_tuning");  // older versions of transformers wrote a number
  const std::int64_t period = fields.integer_or("floor_scale", 8192, 1, limits::positions);
  const double strength = fields.number_or("attn_scale", 0.1, 0.0, 1e3);
  if (tuned != nullptr && tuned->is_number_integer() ? *tuned != 0 : fields.boolean_or("attn_temperature_tuning", true))
    c.query_scaling = {.strength = strength, .period = period, .offset = 1, .rounded = false, .without_rope = true};
  const std::vector<bool> turns = rotary_layers(fields, c);
  const bool typed = fields.find("layer_types") != nullptr;
  const std::vector<bool> chunked = typed ? sliding_layers(fields, c, 0, "chunked_attention") : turns;
  if (fields.is_null("attention_chunk_size")) fields.fail("attention_chunk_size", "is null, and must be a number");
  const std::int64_t chunk = fields.integer_or("attention_chunk_size", 8192, 1, limits::positions);
  for (std::size_t i = 0; i < turns.size(); ++i)
    c.layer_specs.push_back({.chunk = chunked[i] ? chunk : 0, .rope = turns[i] ? 0 : -1});
}

void read_llama4(const JsonFields& fields, ModelConfig& c) {
  read_common(fields, c, {.head_dim = 128, .max_positions = 131072, .norm_eps = 1e-5, .heads = 40, .kv_heads = 8});
  read_llama4_attention(fields, c);
  read_experts(fields, c, {.count = 16, .per_token = 1});
  set_sparse_layers(fields, c, "interleave_moe_layer_step");
  if (fields.find("moe_layers") != nullptr) {
    for (LayerSpec& layer : c.layer_specs) layer.experts = false;
    for (const std::size_t sparse : layers_of(fields, c, "moe_layers")) c.layer_specs[sparse].experts = true;
  }
  ExpertsSpec& e = c.experts;
  e.balance = 0;                         // output_router_logits adds no loss in its class
  fields.know({"router_jitter_noise"});  // nothing in its class looks at it
  e.shared_width = e.width;
  c.intermediate_size = fields.integer_or("intermediate_size_mlp", 16384, 1, limits::intermediate);
  e.sigmoid = e.weights_of_input = e.transposed = true;
  c.names.gate = "feed_forward.gate_proj";
  c.names.up = "feed_forward.up_proj";
  c.names.down = "feed_forward.down_proj";
  c.names.router = "feed_forward.router";
  c.names.shared = "feed_forward.shared_expert";
  c.names.stacked_in = "feed_forward.experts.gate_up_proj";
  c.names.stacked_down = "feed_forward.experts.down_proj";
}

constexpr std::array expert_rows = {
    FamilyRow{"MixtralForCausalLM", "mixtral", read_mixtral},
    FamilyRow{"Qwen2MoeForCausalLM", "qwen2_moe", read_qwen2_moe},
    FamilyRow{"Qwen3MoeForCausalLM", "qwen3_moe", read_qwen3_moe},
    FamilyRow{"OlmoeForCausalLM", "olmoe", read_olmoe},
    FamilyRow{"GraniteMoeForCausalLM", "granitemoe", read_granite_moe},
    FamilyRow{"Glm4MoeForCausalLM", "glm4_moe", read_glm4_moe},
    FamilyRow{"GptOssForCausalLM", "gpt_oss", read_gpt_oss},
    FamilyRow{"Llama4ForCausalLM", "llama4_text", read_llama4},
};

}  // namespace

std::span<const FamilyRow> expert_families() {
  return expert_rows;
}

}  // namespace tierflow

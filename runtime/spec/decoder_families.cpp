// What each family of dense decoders with RMS norms says in its config.json, and where it is silent the defaults of its
// class in transformers.
#include <fmt/format.h>

#include <array>
#include <cmath>

#include "runtime/spec/config_limits.h"
#include "runtime/spec/decoder_fields.h"
#include "runtime/spec/families.h"
#include "runtime/spec/rope_config.h"

namespace tierflow {
namespace {

// Of the layers that slide: rope_scaling is of the others alone.
RopeSpec sliding_rope(const JsonFields& fields, const ModelConfig& c, double theta, const char* theta_field) {
  if (fields.find("rope_parameters") != nullptr) return read_rope(fields, c, theta, {}, "sliding_attention");
  RopeSpec rope;
  rope.theta = fields.number_or(theta_field, theta, 1.0, 1e12);
  return rope;
}

}  // namespace

void read_llama(const JsonFields& fields, ModelConfig& c) {
  read_common(fields, c, {});
  c.ropes = {read_rope(fields, c, 10000.0)};
  bias_of_attention(fields, c);
  c.mlp_bias = fields.boolean_or("mlp_bias", false);
}

void read_mistral(const JsonFields& fields, ModelConfig& c) {
  read_common(fields, c, {.max_positions = 131072, .kv_heads = 8});
  c.ropes = {read_rope(fields, c, 10000.0)};
  set_layers(c, std::vector<bool>(static_cast<std::size_t>(c.layers), true), window(fields, 4096));
}

void read_qwen2(const JsonFields& fields, ModelConfig& c) {
  read_common(fields, c,
              {.head_dim = c.model_type == "qwen3" ? 128 : 0,
               .max_positions = 32768,
               .kv_heads = c.model_type == "qwen2_moe"   ? 16
                           : c.model_type == "qwen3_moe" ? 4
                                                         : 32});
  c.ropes = {read_rope(fields, c, 10000.0)};
  c.qkv_bias = true;
  fields.know({"sliding_window", "max_window_layers", "layer_types"});  // may stand there unused
  if (!fields.boolean_or("use_sliding_window", false)) return;
  std::vector<bool> sliding = sliding_layers(fields, c, 0);
  if (fields.find("layer_types") == nullptr) {
    const std::int64_t full = fields.integer_or("max_window_layers", 28, 0, limits::layers);
    for (std::int64_t i = full; i < c.layers; ++i) sliding[static_cast<std::size_t>(i)] = true;
  }
  set_layers(c, sliding, window(fields, 4096));
}

void read_qwen3(const JsonFields& fields, ModelConfig& c) {
  read_qwen2(fields, c);
  bias_of_attention(fields, c);
  c.qk_norm = QkNorm::head;
}

void read_glm(const JsonFields& fields, ModelConfig& c) {
  read_common(fields, c, {.head_dim = 128, .max_positions = 131072, .norm_eps = 0.00000015625, .kv_heads = 2});
  gate_and_up_in_one(c);
  c.ropes = {read_rope(fields, c, 10000.0, {.partial = 0.5, .any = true})};
  c.ropes[0].interleaved = true;
  c.qkv_bias = fields.boolean_or("attention_bias", true);
}

void read_granite(const JsonFields& fields, ModelConfig& c) {
  read_llama(fields, c);
  c.embedding_multiplier = fields.number_or("embedding_multiplier", 1.0, 1e-6, 1e6);
  c.residual_multiplier = fields.number_or("residual_multiplier", 1.0, 1e-6, 1e6);
  c.attention_scale = fields.number_or("attention_multiplier", 1.0, 1e-9, 1e6);
  c.logits_multiplier = 1 / fields.number_or("logits_scaling", 1.0, 1e-6, 1e6);
}

void read_gpt_oss_attention(const JsonFields& fields, ModelConfig& c) {
  read_common(fields, c, {.head_dim = 64, .max_positions = 131072, .norm_eps = 1e-5, .heads = 64, .kv_heads = 8});
  c.norm = NormKind::rms_wide;
  c.names.sinks = "self_attn.sinks";
  bias_of_attention(fields, c, true);
  if (fields.find("rope_parameters") != nullptr || fields.find("rope_scaling") != nullptr)
    c.ropes = {read_rope(fields, c, 150000.0)};
  else
    c.ropes = {{.theta = fields.number_or("rope_theta", 150000.0, 1.0, 1e12),
                .type = "yarn",
                .factor = 32.0,
                .attention_factor = 0.1 * std::log(32.0) + 1.0,
                .original_max_positions = 4096,
                .truncate = false}};
  set_layers(c, sliding_layers(fields, c, 2), window(fields, 128));
}

namespace {

void read_ministral3(const JsonFields& fields, ModelConfig& c) {
  read_common(fields, c, {.head_dim = 128, .max_positions = 262144, .norm_eps = 1e-5, .kv_heads = 8});
  c.ropes = {read_rope(fields, c, 10000.0)};
  const Json* rope = fields.find("rope_parameters");
  if (rope == nullptr) fields.fail("rope_parameters", "is missing");
  const JsonFields parameters(*rope, fields.where() + ": rope_parameters");
  c.query_scaling = {.strength = parameters.number_or("llama_4_scaling_beta", 0.0, 0.0, 1e3),
                     .period = c.ropes[0].original_max_positions};
  if (c.query_scaling.strength > 0 && c.query_scaling.period == 0)
    parameters.fail("original_max_position_embeddings", "is missing");
  set_layers(c, std::vector<bool>(static_cast<std::size_t>(c.layers), true), window(fields));
}

void read_gemma(const JsonFields& fields, ModelConfig& c) {
  const bool first = c.model_type == "gemma", third = c.model_type == "gemma3_text";
  read_common(fields, c,
              {.head_dim = 256,
               .max_positions = third ? 131072 : 8192,
               .tied = true,
               .activation = "gelu_pytorch_tanh",
               .heads = third ? 8 : 0,
               .kv_heads = first ? 16 : 4},
              // Gemma's hidden_act says gelu in some folders, and tanh's approximation is meant.
              first && fields.find("hidden_activation") == nullptr ? "hidden_act" : "hidden_activation");
  if (first && c.activation == Activation::gelu && fields.find("hidden_activation") == nullptr)
    c.activation = Activation::gelu_tanh;
  c.norm = NormKind::rms_plus_one;
  c.embedding_multiplier = std::sqrt(static_cast<double>(c.hidden_size));
  bias_of_attention(fields, c);
  require(fields, "use_bidirectional_attention", false, false);
  if (!third) c.ropes = {read_rope(fields, c, 10000.0)};
}

void read_gemma2(const JsonFields& fields, ModelConfig& c) {
  read_gemma(fields, c);
  const bool second = c.model_type == "gemma2";
  c.names.attention_out_norm = "post_attention_layernorm";
  c.names.mlp_norm = "pre_feedforward_layernorm";
  c.names.mlp_out_norm = "post_feedforward_layernorm";
  c.attention_scale = 1 / std::sqrt(fields.number_or("query_pre_attn_scalar", 256, 1e-3, 1e9));
  c.attention_softcap = softcap(fields, "attn_logit_softcapping", second ? 50.0 : 0.0);
  c.logits_softcap = softcap(fields, "final_logit_softcapping", second ? 30.0 : 0.0);
  if (second) set_layers(c, sliding_layers(fields, c, 2), window(fields, 4096));
}

void read_gemma3(const JsonFields& fields, ModelConfig& c) {
  read_gemma2(fields, c);
  c.attention_softcap = 0;  // transformers does not read it here
  c.qk_norm = QkNorm::head;
  const RopeSpec local = sliding_rope(fields, c, 10000.0, "rope_local_base_freq");
  c.ropes = {read_rope(fields, c, 1e6, {}, "full_attention"), local};
  fields.know({"_sliding_window_pattern"});
  const std::int64_t period = fields.integer_or("sliding_window_pattern", 6, 1, limits::layers);
  set_layers(c, sliding_layers(fields, c, period), window(fields, 4096), 1, 0);
}

void read_phi3(const JsonFields& fields, ModelConfig& c) {
  read_common(fields, c, {.max_positions = 4096, .norm_eps = 1e-5});
  c.names.q.clear();
  c.names.k.clear();
  c.names.v.clear();
  c.names.qkv = "self_attn.qkv_proj";
  gate_and_up_in_one(c);
  c.ropes = {read_rope(fields, c, 10000.0, {.any = true})};
  if (c.ropes[0].type != "default" && c.ropes[0].type != "longrope")
    fields.fail("rope_scaling", fmt::format("has the type {}; Phi-3 has longrope alone", c.ropes[0].type));
  for (const char* dropout : {"resid_pdrop", "embd_pdrop"})
    if (fields.number_or(dropout, 0.0, 0.0, 1.0) != 0.0) fields.fail(dropout, "other than 0 is not supported");
  set_layers(c, std::vector<bool>(static_cast<std::size_t>(c.layers), true), window(fields));
}

void read_glm4(const JsonFields& fields, ModelConfig& c) {
  read_glm(fields, c);
  c.names.attention_out_norm = "post_self_attn_layernorm";
  c.names.mlp_out_norm = "post_mlp_layernorm";
}

void read_olmo2(const JsonFields& fields, ModelConfig& c) {
  read_common(fields, c, {.norm_eps = 1e-5});
  c.norm = NormKind::rms_wide;
  c.qk_norm = QkNorm::whole;
  norms_after(c);
  bias_of_attention(fields, c);
  if (c.model_type == "olmo3") return;  // has two
  c.ropes = {read_rope(fields, c, 10000.0)};
  c.ropes[0].rounded = false;
}

void read_olmo3(const JsonFields& fields, ModelConfig& c) {
  read_olmo2(fields, c);
  const RopeSpec local = sliding_rope(fields, c, 500000.0, "rope_theta");
  c.ropes = {read_rope(fields, c, 500000.0, {}, "full_attention"), local};
  for (RopeSpec& rope : c.ropes) rope.rounded = false;
  set_layers(c, sliding_layers(fields, c, 4), window(fields, 4096), 1, 0);
}

void read_smollm3(const JsonFields& fields, ModelConfig& c) {
  read_common(fields, c, {.max_positions = 32768, .tied = true, .kv_heads = 4});
  c.ropes = {read_rope(fields, c, 2e6)};
  bias_of_attention(fields, c);
  c.mlp_bias = fields.boolean_or("mlp_bias", false);
  if (fields.boolean_or("use_sliding_window", false) && fields.find("layer_types") == nullptr)
    fields.fail("use_sliding_window", "needs layer_types");
  set_layers(c, sliding_layers(fields, c, 0), window(fields));
  const std::vector<bool> turns = rotary_layers(fields, c);
  for (std::size_t i = 0; i < turns.size(); ++i) c.layer_specs[i].rope = turns[i] ? 0 : -1;
}

void read_seed_oss(const JsonFields& fields, ModelConfig& c) {
  read_common(fields, c, {.head_dim = 128, .max_positions = 524288, .kv_heads = 8});
  c.attention_dropout = dropout(fields, "attention_dropout", 0.1);
  c.residual_dropout = dropout(fields, "residual_dropout", 0.1);
  c.ropes = {read_rope(fields, c, 10000.0)};
  c.qkv_bias = fields.boolean_or("attention_bias", true);
  c.output_bias = fields.boolean_or("attention_out_bias", false);
  c.mlp_bias = fields.boolean_or("mlp_bias", false);
}

void read_exaone4(const JsonFields& fields, ModelConfig& c) {
  read_common(fields, c, {.norm_eps = 1e-5, .kv_heads = 32});
  c.qk_norm = QkNorm::head;
  norms_after(c);
  c.ropes = {read_rope(fields, c, 10000.0)};
  if (fields.find("sliding_window") == nullptr && !fields.is_null("sliding_window"))
    fields.fail("sliding_window", "is missing: null says that no layer slides");
  fields.know({"layer_types", "sliding_window_pattern"});  // may stand there unused
  const bool hybrid = window(fields) > 0;
  if (hybrid && fields.find("layer_types") == nullptr) fields.fail("layer_types", "is missing");
  if (hybrid) set_layers(c, sliding_layers(fields, c, 0), window(fields), 0, -1);
}

void read_arcee(const JsonFields& fields, ModelConfig& c) {
  read_common(fields, c, {.max_positions = 4096, .norm_eps = 1e-5, .activation = "relu2"});
  c.ropes = {read_rope(fields, c, 10000.0)};
  c.gated = false;
  c.names.gate.clear();
  bias_of_attention(fields, c);
  c.mlp_bias = fields.boolean_or("mlp_bias", false);
}

void read_ernie(const JsonFields& fields, ModelConfig& c) {
  read_common(fields, c, {.head_dim = 128, .max_positions = 131072, .norm_eps = 1e-5, .tied = true, .kv_heads = 2});
  c.ropes = {read_rope(fields, c, 500000.0)};
  c.ropes[0].interleaved = true;
  c.ropes[0].rounded = false;
  c.qkv_bias = c.output_bias = c.mlp_bias = fields.boolean_or("use_bias", false);
  c.attention_dropout = 0;
}

void read_helium(const JsonFields& fields, ModelConfig& c) {
  read_common(fields, c, {.head_dim = 128, .max_positions = 4096, .norm_eps = 1e-8, .heads = 20, .kv_heads = 20});
  if (c.heads * c.head_dim != c.hidden_size)
    fields.fail("head_dim",
                fmt::format("is {}; {} heads of this class take hidden_size {}", c.head_dim, c.heads, c.hidden_size));
  c.norm = NormKind::rms_wide;
  c.ropes = {read_rope(fields, c, 100000.0)};
  c.ropes[0].interleaved = true;
  c.qkv_bias = fields.boolean_or("attention_bias", false);
  c.mlp_bias = fields.boolean_or("mlp_bias", false);
}

void read_cwm(const JsonFields& fields, ModelConfig& c) {
  read_common(fields, c, {.head_dim = 128, .max_positions = 131072, .norm_eps = 1e-5, .heads = 48, .kv_heads = 8});
  if (fields.find("rope_parameters") != nullptr || fields.find("rope_scaling") != nullptr)
    c.ropes = {read_rope(fields, c, 1e6)};
  else
    c.ropes = {{.theta = fields.number_or("rope_theta", 1e6, 1.0, 1e12),
                .type = "llama3",
                .factor = 16.0,
                .original_max_positions = 8192}};
  c.mlp_bias = fields.boolean_or("mlp_bias", false);
  std::vector<bool> sliding = sliding_layers(fields, c, 0);
  if (fields.find("layer_types") == nullptr)
    for (std::size_t i = 0; i < sliding.size(); ++i) sliding[i] = i % 4 != 0;
  set_layers(c, sliding, window(fields, 8192));
}

void read_hyperclovax(const JsonFields& fields, ModelConfig& c) {
  read_granite(fields, c);
  c.attention_scale = fields.number_or("attention_multiplier", 0.0, 1e-9, 1e6);
  c.logits_multiplier = fields.number_or("logits_scaling", 1.0, 1e-6, 1e6);
  if (!fields.boolean_or("use_post_norm", true)) return;
  c.names.attention_out_norm = "post_norm1";
  c.names.mlp_out_norm = "post_norm2";
}

void read_hunyuan(const JsonFields& fields, ModelConfig& c) {
  read_common(fields, c, {.norm_eps = 1e-5});
  c.ropes = {read_rope(fields, c, 10000.0, {.alpha = true})};
  bias_of_attention(fields, c);
  for (const char* other : {"mlp_bias", "use_cla"}) require(fields, other, false, false);
  require(fields, "use_qk_norm", true, true);
  fields.know({"eod_token_id"});
  c.qk_norm = QkNorm::head_rotated;
  c.names.q_norm = "self_attn.query_layernorm";
  c.names.k_norm = "self_attn.key_layernorm";
}

constexpr std::array decoder_rows = {
    FamilyRow{"LlamaForCausalLM", "llama", read_llama},
    FamilyRow{"MistralForCausalLM", "mistral", read_mistral},
    FamilyRow{"Ministral3ForCausalLM", "ministral3", read_ministral3},
    FamilyRow{"Qwen2ForCausalLM", "qwen2", read_qwen2},
    FamilyRow{"Qwen3ForCausalLM", "qwen3", read_qwen3},
    FamilyRow{"GemmaForCausalLM", "gemma", read_gemma},
    FamilyRow{"Gemma2ForCausalLM", "gemma2", read_gemma2},
    FamilyRow{"Gemma3ForCausalLM", "gemma3_text", read_gemma3, 262208},
    FamilyRow{"Phi3ForCausalLM", "phi3", read_phi3},
    FamilyRow{"GlmForCausalLM", "glm", read_glm},
    FamilyRow{"Glm4ForCausalLM", "glm4", read_glm4},
    FamilyRow{"Olmo2ForCausalLM", "olmo2", read_olmo2},
    FamilyRow{"Olmo3ForCausalLM", "olmo3", read_olmo3},
    FamilyRow{"SmolLM3ForCausalLM", "smollm3", read_smollm3},
    FamilyRow{"GraniteForCausalLM", "granite", read_granite},
    FamilyRow{"SeedOssForCausalLM", "seed_oss", read_seed_oss},
    FamilyRow{"Exaone4ForCausalLM", "exaone4", read_exaone4},
    FamilyRow{"ArceeForCausalLM", "arcee", read_arcee},
    FamilyRow{"Ernie4_5ForCausalLM", "ernie4_5", read_ernie},
    FamilyRow{"HeliumForCausalLM", "helium", read_helium},
    FamilyRow{"CwmForCausalLM", "cwm", read_cwm},
    FamilyRow{"HyperCLOVAXForCausalLM", "hyperclovax", read_hyperclovax},
    FamilyRow{"HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", read_hunyuan},
};

}  // namespace

std::span<const FamilyRow> rms_norm_families() {
  return decoder_rows;
}

}  // namespace tierflow

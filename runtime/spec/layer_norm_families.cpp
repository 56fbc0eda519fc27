// What each family of dense decoders with layer norms says in its config.json, and where it is silent the defaults of
// its class in transformers.
#include <fmt/format.h>

#include <array>
#include <cmath>

#include "runtime/spec/config_limits.h"
#include "runtime/spec/decoder_fields.h"
#include "runtime/spec/families.h"
#include "runtime/spec/rope_config.h"

namespace tierflow {
namespace {

// GPT-NeoX's and GLM-130B's: layer norms and biases everywhere; q, k and v of each head together.
void products_by_head(ModelConfig& c) {
  c.norm = NormKind::layer;
  c.kv_heads = c.heads;
  c.names.q.clear();
  c.names.k.clear();
  c.names.v.clear();
  c.names.gate.clear();
  c.names.qkv = "attention.query_key_value";
  c.qkv_by_head = true;
  c.names.o = "attention.dense";
  c.names.down = "mlp.dense_4h_to_h";
  c.mlp_bias = true;
}

void read_cohere(const JsonFields& fields, ModelConfig& c) {
  read_common(fields, c, {.max_positions = 8192, .norm_eps = 1e-5, .tied = true}, "hidden_act", "layer_norm_eps");
  c.norm = NormKind::layer_no_bias;
  c.parallel = true;
  c.names.mlp_norm.clear();
  c.ropes = {read_rope(fields, c, c.model_type == "cohere" ? 500000.0 : 10000.0)};
  c.ropes[0].interleaved = true;
  bias_of_attention(fields, c);
  c.logits_multiplier = fields.number_or("logit_scale", 0.0625, 1e-6, 1e6);
  if (fields.boolean_or("use_qk_norm", false)) c.qk_norm = QkNorm::own;
}

void read_cohere2(const JsonFields& fields, ModelConfig& c) {
  read_cohere(fields, c);
  const std::int64_t period = fields.integer_or("sliding_window_pattern", 4, 1, limits::layers);
  set_layers(c, sliding_layers(fields, c, period), window(fields, 4096), 0, -1);
}

void read_gpt_neox(const JsonFields& fields, ModelConfig& c) {
  read_common(fields, c, {.norm_eps = 1e-5, .activation = "gelu"}, "hidden_act", "layer_norm_eps");
  products_by_head(c);
  c.gated = false;
  c.parallel = fields.boolean_or("use_parallel_residual", true);
  c.names.prefix = "gpt_neox.";
  c.names.tokens = "embed_in.weight";
  c.names.norm = "gpt_neox.final_layer_norm";
  c.names.head = "embed_out.weight";
  c.names.up = "mlp.dense_h_to_4h";
  bias_of_attention(fields, c, true);
  c.residual_dropout = c.embedding_dropout = dropout(fields, "hidden_dropout", 0.0);
  fields.know({"classifier_dropout"});
  const double base = fields.number_or("rotary_emb_base", 10000.0, 1.0, 1e12),
               share = fields.number_or("rotary_pct", 0.25, 0.0, 1.0);
  // By which of two names the class goes depends on its version.
  if (fields.number_or("rope_theta", base, 1.0, 1e12) != base)
    fields.fail("rope_theta", fmt::format("is not rotary_emb_base, {}", base));
  if (fields.number_or("partial_rotary_factor", share, 0.0, 1.0) != share)
    fields.fail("partial_rotary_factor", fmt::format("is not rotary_pct, {}", share));
  c.ropes = {read_rope(fields, c, base, {.partial = share, .any = true})};
}

// Zeng et al., GLM-130B, 2022: DeepNorm and GeGLU. As a causal model: no token sees those behind it.
void read_glm130b(const JsonFields& fields, ModelConfig& c) {
  read_common(fields, c, {.norm_eps = 1e-5, .tied = true, .activation = "gelu"}, "hidden_act", "layernorm_epsilon");
  products_by_head(c);
  c.names.prefix = "transformer.";
  c.names.tokens = "word_embeddings.weight";
  c.names.norm = "transformer.final_layernorm";
  c.names.up.clear();
  c.names.gate_up = "mlp.dense_h_to_4h";
  c.up_first = true;
  c.qkv_bias = c.output_bias = true;
  c.normed_residual = std::sqrt(2.0 * static_cast<double>(c.layers));
  c.ropes = {read_rope(fields, c, 10000.0)};
}

void read_starcoder2(const JsonFields& fields, ModelConfig& c) {
  read_common(fields, c,
              {.max_positions = 4096,
               .norm_eps = 1e-5,
               .initializer_range = 0.018042,
               .tied = true,
               .activation = "gelu_pytorch_tanh",
               .kv_heads = 2},
              "hidden_act", "norm_epsilon");
  c.norm = NormKind::layer;
  c.gated = false;
  c.names.gate.clear();
  c.names.up = "mlp.c_fc";
  c.names.down = "mlp.c_proj";
  c.qkv_bias = c.output_bias = c.mlp_bias = fields.boolean_or("use_bias", true);
  c.ropes = {read_rope(fields, c, 10000.0)};
  c.residual_dropout = dropout(fields, "residual_dropout", 0.0);
  c.embedding_dropout = dropout(fields, "embedding_dropout", 0.0);
  set_layers(c, std::vector<bool>(static_cast<std::size_t>(c.layers), true), window(fields));
}

void read_stablelm(const JsonFields& fields, ModelConfig& c) {
  read_common(fields, c, {.max_positions = 4096, .norm_eps = 1e-5, .heads = 32, .kv_heads = 32}, "hidden_act",
              "layer_norm_eps");
  c.norm = NormKind::layer;
  c.parallel = fields.boolean_or("use_parallel_residual", false);
  if (c.parallel) c.names.mlp_norm.clear();
  c.qkv_bias = fields.boolean_or("use_qkv_bias", false);
  c.ropes = {read_rope(fields, c, 10000.0, {.partial = 0.25, .any = true})};
  require(fields, "qk_layernorm", false, false);
  if (dropout(fields, "hidden_dropout", 0.0) != 0.0) fields.fail("hidden_dropout", "other than 0 is not supported");
}

void read_nemotron(const JsonFields& fields, ModelConfig& c) {
  read_common(
      fields, c,
      {.max_positions = 4096, .norm_eps = 1e-5, .initializer_range = 0.0134, .activation = "relu2", .heads = 48},
      "hidden_act", "norm_eps");
  c.norm = NormKind::layer_plus_one;
  c.gated = false;
  c.names.gate.clear();
  c.ropes = {read_rope(fields, c, 10000.0, {.partial = 0.5, .any = true})};
  bias_of_attention(fields, c);
  c.mlp_bias = fields.boolean_or("mlp_bias", false);
}

void read_jais2(const JsonFields& fields, ModelConfig& c) {
  read_common(fields, c, {.max_positions = 8192, .norm_eps = 1e-5, .activation = "relu2", .heads = 26}, "hidden_act",
              "layer_norm_eps");
  c.norm = NormKind::layer;
  c.gated = false;
  c.names.gate.clear();
  c.ropes = {read_rope(fields, c, 10000.0)};
  bias_of_attention(fields, c, true);
  c.mlp_bias = fields.boolean_or("mlp_bias", true);
}

// GPT-2's and OPT's: layer norms, learned positions, an MLP without gate, heads of equal parts, biases.
void with_learned_positions(const JsonFields& fields, const char* size, ModelConfig& c) {
  if (c.hidden_size % c.heads != 0)
    fields.fail(size, fmt::format("is {}, not a multiple of the {} heads", c.hidden_size, c.heads));
  c.kv_heads = c.heads;
  c.head_dim = c.hidden_size / c.heads;
  c.qkv_bias = c.output_bias = c.mlp_bias = true;
  c.norm = NormKind::layer;
  c.gated = false;
  c.names.gate.clear();
  c.ropes.clear();
  c.layer_specs.assign(static_cast<std::size_t>(c.layers), {.rope = -1});
}

void read_gpt2(const JsonFields& fields, ModelConfig& c) {
  c.hidden_size = fields.integer("n_embd", 1, limits::hidden);
  c.intermediate_size = fields.integer_or("n_inner", 4 * c.hidden_size, 1, limits::intermediate);
  c.layers = fields.integer("n_layer", 1, limits::layers);
  c.heads = fields.integer("n_head", 1, limits::heads);
  c.max_positions = fields.integer_or("n_positions", 1024, 1, limits::positions);
  with_learned_positions(fields, "n_embd", c);
  c.transposed = true;
  c.names.prefix = "transformer.";
  c.names.tokens = "wte.weight";
  c.names.positions = "wpe.weight";
  c.names.norm = "transformer.ln_f";
  c.names.layers = "h.";
  c.names.q.clear();
  c.names.k.clear();
  c.names.v.clear();
  c.names.qkv = "attn.c_attn";
  c.names.o = "attn.c_proj";
  c.names.up = "mlp.c_fc";
  c.names.down = "mlp.c_proj";
  c.names.attention_norm = "ln_1";
  c.names.mlp_norm = "ln_2";
  c.norm_eps = fields.number_or("layer_norm_epsilon", 1e-5, 0.0, 1.0);
  c.initializer_range = fields.number_or("initializer_range", 0.02, 0.0, 10.0);
  c.residual_range = c.initializer_range / std::sqrt(2.0 * static_cast<double>(c.layers));
  c.activation = read_activation(fields, "activation_function", "gelu_new");
  c.tie_word_embeddings = fields.boolean_or("tie_word_embeddings", true);
  c.embedding_dropout = fields.number_or("embd_pdrop", 0.1, 0.0, 0.999);
  c.residual_dropout = fields.number_or("resid_pdrop", 0.1, 0.0, 0.999);
  c.attention_dropout = fields.number_or("attn_pdrop", 0.1, 0.0, 0.999);
  fields.know({"n_ctx", "reorder_and_upcast_attn", "summary_activation", "summary_first_dropout",
               "summary_proj_to_labels", "summary_type", "summary_use_proj"});
  require(fields, "scale_attn_weights", true, true);
  require(fields, "scale_attn_by_inverse_layer_idx", false, false);
  require(fields, "add_cross_attention", false, false);
}

void read_opt(const JsonFields& fields, ModelConfig& c) {
  c.hidden_size = fields.integer("hidden_size", 1, limits::hidden);
  c.intermediate_size = fields.integer("ffn_dim", 1, limits::intermediate);
  c.layers = fields.integer("num_hidden_layers", 1, limits::layers);
  c.heads = fields.integer("num_attention_heads", 1, limits::heads);
  c.max_positions = fields.integer_or("max_position_embeddings", 2048, 1, limits::positions);
  with_learned_positions(fields, "hidden_size", c);
  c.names.prefix = "model.decoder.";
  c.names.positions = "embed_positions.weight";
  c.names.o = "self_attn.out_proj";
  c.names.up = "fc1";
  c.names.down = "fc2";
  c.norm_of_sum = !fields.boolean_or("do_layer_norm_before", true);
  c.names.norm = c.norm_of_sum ? "" : "model.decoder.final_layer_norm";
  if (c.norm_of_sum) norms_after(c);
  (c.norm_of_sum ? c.names.attention_out_norm : c.names.attention_norm) = "self_attn_layer_norm";
  (c.norm_of_sum ? c.names.mlp_out_norm : c.names.mlp_norm) = "final_layer_norm";
  c.qkv_bias = c.output_bias = c.mlp_bias = fields.boolean_or("enable_bias", true);
  c.norm_eps = 1e-5;
  c.initializer_range = fields.number_or("init_std", 0.02, 0.0, 10.0);
  c.activation = read_activation(fields, "activation_function", "relu");
  c.tie_word_embeddings = fields.boolean_or("tie_word_embeddings", true);
  c.residual_dropout = fields.number_or("dropout", 0.1, 0.0, 0.999);
  c.attention_dropout = fields.number_or("attention_dropout", 0.0, 0.0, 0.999);
  c.position_offset = 2;
  require(fields, "_remove_final_layer_norm", false, false);
  require(fields, "layer_norm_elementwise_affine", true, true);
  if (fields.number_or("layerdrop", 0.0, 0.0, 1.0) != 0.0) fields.fail("layerdrop", "other than 0 is not supported");
  const std::int64_t projection = fields.integer_or("word_embed_proj_dim", c.hidden_size, 1, limits::hidden);
  if (projection != c.hidden_size)
    fields.fail("word_embed_proj_dim",
                fmt::format("is {}, other than hidden_size {}: projected embeddings (opt-350m) are not supported",
                            projection, c.hidden_size));
}

constexpr std::array layer_norm_rows = {
    FamilyRow{"CohereForCausalLM", "cohere", read_cohere},
    FamilyRow{"Cohere2ForCausalLM", "cohere2", read_cohere2},
    FamilyRow{"GPTNeoXForCausalLM", "gpt_neox", read_gpt_neox},
    FamilyRow{"GLM130BForCausalLM", "glm130b", read_glm130b},
    FamilyRow{"Starcoder2ForCausalLM", "starcoder2", read_starcoder2},
    FamilyRow{"StableLmForCausalLM", "stablelm", read_stablelm},
    FamilyRow{"NemotronForCausalLM", "nemotron", read_nemotron},
    FamilyRow{"Jais2ForCausalLM", "jais2", read_jais2},
    FamilyRow{"GPT2LMHeadModel", "gpt2", read_gpt2},
    FamilyRow{"OPTForCausalLM", "opt", read_opt},
};

}  // namespace

std::span<const FamilyRow> layer_norm_families() {
  return layer_norm_rows;
}

}  // namespace tierflow

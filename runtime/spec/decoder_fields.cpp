#include "runtime/spec/decoder_fields.h"

#include <fmt/format.h>

#include "runtime/spec/config_limits.h"
#include "runtime/spec/families.h"

namespace tierflow {

double dropout(const JsonFields& fields, const char* name, double fallback) {
  return fields.number_or(name, fallback, 0.0, 0.999);
}

void read_common(const JsonFields& fields, ModelConfig& c, const DecoderDefaults& defaults,
                 const char* activation_field, const char* eps_field) {
  c.hidden_size = fields.integer("hidden_size", 1, limits::hidden);
  c.intermediate_size = fields.integer("intermediate_size", 1, limits::intermediate);
  c.layers = fields.integer("num_hidden_layers", 1, limits::layers);
  c.heads = defaults.heads == 0 ? fields.integer("num_attention_heads", 1, limits::heads)
                                : fields.integer_or("num_attention_heads", defaults.heads, 1, limits::heads);
  const bool all_heads = defaults.kv_heads == 0 || fields.is_null("num_key_value_heads");
  const std::int64_t kv_heads = all_heads ? c.heads : defaults.kv_heads;
  c.kv_heads = fields.integer_or("num_key_value_heads", kv_heads, 1, limits::heads);
  c.head_dim = fields.integer_or("head_dim", fields.is_null("head_dim") ? 0 : defaults.head_dim, 1, limits::hidden);
  if (c.head_dim == 0) {
    if (c.hidden_size % c.heads != 0)
      fields.fail("hidden_size",
                  fmt::format("is {}, not a multiple of num_attention_heads {}", c.hidden_size, c.heads));
    c.head_dim = c.hidden_size / c.heads;
  }
  if (c.heads % c.kv_heads != 0)
    fields.fail("num_attention_heads",
                fmt::format("is {}, not a multiple of num_key_value_heads {}", c.heads, c.kv_heads));
  if (c.head_dim % 2 != 0)
    fields.fail("head_dim", fmt::format("is {}; rotary embeddings need an even one", c.head_dim));
  if (c.heads * c.head_dim > 16 * limits::hidden)
    fields.fail("num_attention_heads",
                fmt::format("times the head's size is {}, which is absurd", c.heads * c.head_dim));
  c.max_positions = fields.integer_or("max_position_embeddings", defaults.max_positions, 1, limits::positions);
  c.norm_eps = fields.number_or(eps_field, defaults.norm_eps, 0.0, 1.0);
  c.initializer_range = fields.number_or("initializer_range", defaults.initializer_range, 0.0, 10.0);
  c.activation = read_activation(fields, activation_field, defaults.activation);
  c.tie_word_embeddings = fields.boolean_or("tie_word_embeddings", defaults.tied);
  c.attention_dropout = dropout(fields, "attention_dropout", 0.0);
}

void bias_of_attention(const JsonFields& fields, ModelConfig& c, bool fallback) {
  c.qkv_bias = c.output_bias = fields.boolean_or("attention_bias", fallback);
}

std::int64_t window(const JsonFields& fields, std::int64_t fallback) {
  return fields.integer_or("sliding_window", fields.is_null("sliding_window") ? 0 : fallback, 1, limits::positions);
}

double softcap(const JsonFields& fields, const char* name, double fallback) {
  return fields.number_or(name, fields.is_null(name) ? 0.0 : fallback, 1e-3, 1e9);
}

void set_layers(ModelConfig& c, const std::vector<bool>& sliding, std::int64_t window, int sliding_rope,
                int full_rope) {
  c.layer_specs.clear();
  for (const bool slides : sliding)
    c.layer_specs.push_back({.window = slides ? window : 0, .rope = slides ? sliding_rope : full_rope});
}

void gate_and_up_in_one(ModelConfig& c) {
  c.names.gate.clear();
  c.names.up.clear();
  c.names.gate_up = "mlp.gate_up_proj";
}

void norms_after(ModelConfig& c) {
  c.names.attention_norm.clear();
  c.names.mlp_norm.clear();
  c.names.attention_out_norm = "post_attention_layernorm";
  c.names.mlp_out_norm = "post_feedforward_layernorm";
}

}  // namespace tierflow

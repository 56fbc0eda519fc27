#pragma once
// What the families of decoders read in the same way from their config.json (decoder_families.cpp).
#include <cstdint>
#include <vector>

#include "runtime/base/strict_json.h"
#include "runtime/spec/model_spec.h"

namespace tierflow {

// Of the class in transformers, where config.json is silent.
struct DecoderDefaults {
  std::int64_t head_dim = 0, max_positions = 2048;  // head_dim 0: hidden_size / heads
  double norm_eps = 1e-6, initializer_range = 0.02;
  bool tied = false;
  const char* activation = "silu";
  std::int64_t heads = 0;     // 0: config.json must give it
  std::int64_t kv_heads = 0;  // 0: as many as heads, as for null
};

// What all have: sizes, heads, positions, the norms' epsilon, activation, tying. Throws Exception (kind input).
void read_common(const JsonFields& fields, ModelConfig& config, const DecoderDefaults& defaults,
                 const char* activation_field = "hidden_act", const char* eps_field = "rms_norm_eps");
double dropout(const JsonFields& fields, const char* name, double fallback);
void bias_of_attention(const JsonFields& fields, ModelConfig& config, bool fallback = false);
// 0: there is none.
std::int64_t window(const JsonFields& fields, std::int64_t fallback = 0);
double softcap(const JsonFields& fields, const char* name, double fallback);
// A layer whose attention slides has the window and the rotary embedding `sliding_rope`, the others `full_rope`.
void set_layers(ModelConfig& config, const std::vector<bool>& sliding, std::int64_t window, int sliding_rope = 0,
                int full_rope = 0);
void gate_and_up_in_one(ModelConfig& config);
// OLMo 2's and EXAONE 4's places: norms of what the halves add alone.
void norms_after(ModelConfig& config);

}  // namespace tierflow

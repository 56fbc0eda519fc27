#pragma once
// Small specifications of every family, and batches for them.
#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "runtime/spec/model_spec.h"
#include "tests/runtime/models/run.h"

namespace tierflow::testing {

inline std::string llama_json(const std::string& model_class, const std::string& more, int intermediate = 48) {
  return R"({"architectures": [")" + model_class + R"("], "vocab_size": 96, "hidden_size": 32, "intermediate_size": )" +
         std::to_string(intermediate) + R"(, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5)" +
         more + "}";
}

struct Case {
  std::string name, json;
};
inline void PrintTo(const Case& which, std::ostream* out) {
  *out << which.name;
}

inline std::vector<Case> cases(const std::string& dropout = "0.0") {
  const std::string gpt2 =
      R"({"architectures": ["GPT2LMHeadModel"], "vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4,
    "n_positions": 64, "embd_pdrop": )" +
      dropout + R"(, "resid_pdrop": )" + dropout + R"(, "attn_pdrop": )" + dropout;
  const std::string opt = R"({"architectures": ["OPTForCausalLM"], "vocab_size": 96, "hidden_size": 32, "ffn_dim": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64, "word_embed_proj_dim": 32, "dropout": )" +
                          dropout;
  return {
      {"llama", llama_json("LlamaForCausalLM",
                           R"(, "rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32})")},
      {"llama_biases",
       llama_json("LlamaForCausalLM", R"(, "attention_bias": true, "mlp_bias": true, "tie_word_embeddings": true)")},
      {"llama_gelu", llama_json("LlamaForCausalLM", R"(, "hidden_act": "gelu")")},
      {"mistral", llama_json("MistralForCausalLM", R"(, "sliding_window": 7, "attention_dropout": )" + dropout)},
      {"qwen2", llama_json("Qwen2ForCausalLM", R"(, "tie_word_embeddings": true)")},
      {"qwen3", llama_json("Qwen3ForCausalLM", R"(, "head_dim": 16)")},
      {"ministral3", llama_json("Ministral3ForCausalLM", R"(, "head_dim": 8, "rope_parameters": {"rope_type": "yarn",
        "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.1})")},
      {"gemma2", llama_json("Gemma2ForCausalLM", R"(, "head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0)")},
      {"gemma3", llama_json("Gemma3ForCausalLM", R"(, "head_dim": 8, "sliding_window": 5, "sliding_window_pattern": 2,
        "rope_local_base_freq": 100.0)")},
      {"phi3", llama_json("Phi3ForCausalLM", R"(, "partial_rotary_factor": 0.5, "rope_parameters": {"rope_type":
        "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0], "original_max_position_embeddings": 512})")},
      {"olmo2", llama_json("Olmo2ForCausalLM", "")},
      {"granite", llama_json("GraniteForCausalLM", R"(, "embedding_multiplier": 3.0, "residual_multiplier": 0.5,
        "attention_multiplier": 0.2, "logits_scaling": 2.0)")},
      {"cohere2", llama_json("Cohere2ForCausalLM", R"(, "sliding_window": 5, "sliding_window_pattern": 2,
        "logit_scale": 0.5)")},
      {"cohere_qk_norm", llama_json("CohereForCausalLM", R"(, "use_qk_norm": true, "logit_scale": 0.5)")},
      {"gpt_neox", llama_json("GPTNeoXForCausalLM", R"(, "rotary_pct": 0.5)")},
      {"gpt_neox_in_turn", llama_json("GPTNeoXForCausalLM", R"(, "rotary_pct": 0.5, "use_parallel_residual": false)")},
      {"glm130b", llama_json("GLM130BForCausalLM", "")},
      {"starcoder2", llama_json("Starcoder2ForCausalLM", "")},
      {"nemotron", llama_json("NemotronForCausalLM", "")},
      {"hunyuan_v1_dense", llama_json("HunYuanDenseV1ForCausalLM", R"(, "head_dim": 16, "rope_scaling": {"type":
        "dynamic", "alpha": 50.0})")},
      {"starcoder2_dropout", llama_json("Starcoder2ForCausalLM", R"(, "residual_dropout": )" + dropout +
                                                                     R"(, "embedding_dropout": )" + dropout)},
      {"mixtral", llama_json("MixtralForCausalLM", R"(, "num_local_experts": 4, "num_experts_per_tok": 2)", 24)},
      {"qwen2_moe", llama_json("Qwen2MoeForCausalLM", R"(, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16)")},
      {"granite_moe", llama_json("GraniteMoeForCausalLM", R"(, "num_local_experts": 3, "num_experts_per_tok": 2,
        "residual_multiplier": 0.5)",
                                 24)},
      {"glm4_moe", llama_json("Glm4MoeForCausalLM", R"(, "head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "n_shared_experts": 1, "first_k_dense_replace": 0, "routed_scaling_factor": 1.5,
        "n_group": 2, "topk_group": 1, "use_qk_norm": true)")},
      {"gpt_oss", llama_json("GptOssForCausalLM", R"(, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
        "sliding_window": 5, "swiglu_limit": 0.5, "rope_parameters": {"rope_type": "yarn", "factor": 4.0,
        "rope_theta": 10000.0, "original_max_position_embeddings": 8, "truncate": false})",
                             24)},
      {"llama4", llama_json("Llama4ForCausalLM", R"(, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
        "attention_chunk_size": 6, "no_rope_layer_interval": 2, "floor_scale": 5, "attn_scale": 0.5,
        "intermediate_size_mlp": 40)",
                            24)},
      {"gpt2", gpt2 + "}"},
      {"gpt2_untied", gpt2 + R"(, "tie_word_embeddings": false})"},
      {"opt", opt + "}"},
      {"opt_norm_after", opt + R"(, "do_layer_norm_before": false})"},
      {"opt_untied", opt + R"(, "tie_word_embeddings": false, "enable_bias": false})"},
  };
}

// The same and one with the load-balancing loss of routers, which is no sum over tokens.
inline std::vector<Case> cases_with_balance(const std::string& dropout = "0.0") {
  std::vector<Case> all = cases(dropout);
  const auto mixtral = std::find_if(all.begin(), all.end(), [](const Case& one) { return one.name == "mixtral"; });
  all.insert(mixtral + 1, {"mixtral_balanced",
                           llama_json("MixtralForCausalLM", R"(, "num_local_experts": 4, "num_experts_per_tok": 2,
        "output_router_logits": true, "router_aux_loss_coef": 0.5)",
                                      24)});
  return all;
}

inline Case case_called(const std::string& name) {
  for (const Case& one : cases_with_balance())
    if (one.name == name) return one;
  throw std::logic_error("no case " + name);
}

// Cuts the small models' vocabulary into tiles of 30, 30, 30 and 6 rows, and their blocks in two.
inline constexpr Tiling kTiled{.vocabulary_elements = 32 * 30, .block_elements = 1};

inline ResidentModel resident(const Case& which, torch::ScalarType type, double scale = 0.2,
                              const Tiling& tiling = {}) {
  ResidentModel model(parse_model_spec(which.json, which.name, tiling), type);
  model.randomise(17, scale);
  return model;
}

// The frozen tensors have no gradients.
inline ResidentModel adapted_model(const ModelSpec& spec, torch::ScalarType type) {
  ResidentModel model(spec, type);
  model.randomise(17);
  for (std::size_t u = 0; u < model.gradients.size(); ++u)
    for (std::size_t t = 0; t < model.gradients[u].size(); ++t)
      if (!spec.units[u].tensors[t].trainable) model.gradients[u][t] = torch::Tensor();
  return model;
}

// Random tokens; some labels do not count.
inline MicroBatch batch(std::int64_t rows, std::int64_t length, std::int64_t vocab = 96) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(5);
  MicroBatch batch{.ids = torch::randint(vocab, {rows, length}, generator, torch::kLong),
                   .labels = torch::randint(vocab, {rows, length}, generator, torch::kLong)};
  batch.labels.index_put_({0, torch::indexing::Slice(2, 5)}, -100);
  return batch;
}

// The same of rows packed with documents of these lengths, of which each row has the same sum.
using Lengths = std::vector<std::vector<std::int64_t>>;
inline MicroBatch packed(const Lengths& lengths) {
  std::vector<torch::Tensor> rows;
  for (const auto& row : lengths) {
    std::vector<torch::Tensor> positions;
    for (const std::int64_t length : row) positions.push_back(torch::arange(length));
    rows.push_back(torch::cat(positions));
  }
  MicroBatch packed = batch(static_cast<std::int64_t>(rows.size()), rows[0].size(0));
  packed.positions = torch::stack(rows);
  return packed;
}

inline double relative_error(const torch::Tensor& a, const torch::Tensor& b) {
  const torch::Tensor x = a.to(torch::kDouble), y = b.to(torch::kDouble);
  return ((x - y).norm() / (y.norm() + 1e-30)).item<double>();
}

class EveryModel : public ::testing::TestWithParam<Case> {};

inline std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  return info.param.name;
}

}  // namespace tierflow::testing

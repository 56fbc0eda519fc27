#include "runtime/spec/families.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>

#include "runtime/base/edit_distance.h"
#include "runtime/base/exception.h"
#include "runtime/base/files.h"
#include "runtime/spec/config_limits.h"
#include "runtime/spec/decoder_fields.h"

namespace tierflow {
namespace {

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

constexpr std::array families = {
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
    FamilyRow{"CohereForCausalLM", "cohere", read_cohere},
    FamilyRow{"Cohere2ForCausalLM", "cohere2", read_cohere2},
    FamilyRow{"GPTNeoXForCausalLM", "gpt_neox", read_gpt_neox},
    FamilyRow{"GLM130BForCausalLM", "glm130b", read_glm130b},
    FamilyRow{"Starcoder2ForCausalLM", "starcoder2", read_starcoder2},
    FamilyRow{"SeedOssForCausalLM", "seed_oss", read_seed_oss},
    FamilyRow{"Exaone4ForCausalLM", "exaone4", read_exaone4},
    FamilyRow{"ArceeForCausalLM", "arcee", read_arcee},
    FamilyRow{"Ernie4_5ForCausalLM", "ernie4_5", read_ernie},
    FamilyRow{"MixtralForCausalLM", "mixtral", read_mixtral},
    FamilyRow{"Qwen2MoeForCausalLM", "qwen2_moe", read_qwen2_moe},
    FamilyRow{"Qwen3MoeForCausalLM", "qwen3_moe", read_qwen3_moe},
    FamilyRow{"OlmoeForCausalLM", "olmoe", read_olmoe},
    FamilyRow{"GraniteMoeForCausalLM", "granitemoe", read_granite_moe},
    FamilyRow{"Glm4MoeForCausalLM", "glm4_moe", read_glm4_moe},
    FamilyRow{"GptOssForCausalLM", "gpt_oss", read_gpt_oss},
    FamilyRow{"GPT2LMHeadModel", "gpt2", read_gpt2},
    FamilyRow{"OPTForCausalLM", "opt", read_opt},
};

// Fields of any config.json that change nothing in what the language model computes.
constexpr std::array<std::string_view, 34> neutral = {"_name_or_path",
                                                      "_attn_implementation",
                                                      "architectures",
                                                      "attn_implementation",
                                                      "auto_map",
                                                      "bos_token_id",
                                                      "chunk_size_feed_forward",
                                                      "dtype",
                                                      "eos_token_id",
                                                      "finetuning_task",
                                                      "id2label",
                                                      "is_decoder",
                                                      "is_encoder_decoder",
                                                      "label2id",
                                                      "max_position_embeddings",
                                                      "model_type",
                                                      "name_or_path",
                                                      "original_max_position_embeddings",
                                                      "output_attentions",
                                                      "output_hidden_states",
                                                      "pad_token_id",
                                                      "pretraining_tp",
                                                      "problem_type",
                                                      "quantization_config",
                                                      "return_dict",
                                                      "rope_type",
                                                      "sep_token_id",
                                                      "task_specific_params",
                                                      "tokenizer_class",
                                                      "torch_dtype",
                                                      "transformers_version",
                                                      "type",
                                                      "unk_token_id",
                                                      "use_cache"};

// Those of the object, and of objects in it, that nothing asked for.
void find_unknown(const Json& object, const FieldsAsked& asked, std::vector<std::string>& unknown) {
  for (const auto& [name, value] : object.items()) {
    if (value.is_null() || std::ranges::find(neutral, name) != neutral.end()) continue;
    if (!asked.has(object, name))
      unknown.push_back(printable(name));
    else if (value.is_object())
      find_unknown(value, asked, unknown);
  }
}

std::string lower(std::string_view name) {
  std::string text;
  for (const char each : name)
    if (each != '_') text += static_cast<char>(std::tolower(static_cast<unsigned char>(each)));
  return text;
}

// The families that have every field there: the one whose name is nearest, else the plainest. Nothing where there is
// none.
std::string offer(const JsonFields& fields, const std::string& name) {
  const FamilyRow* found = nullptr;
  const std::string wanted = lower(name.substr(0, std::min<std::size_t>(name.find("For"), 64)));
  std::size_t least = std::max<std::size_t>(2, wanted.size() / 3) + 1;
  for (const FamilyRow& row : families) {
    const std::string own = lower(row.model_type);
    const std::size_t d = wanted.find(own) != std::string::npos ? 0 : edit_distance(wanted, own);
    if (found != nullptr && d >= least) continue;
    try {
      read_config(row, fields, /*named=*/true);
    } catch (const Exception&) {
      continue;
    }
    found = &row;
    least = std::min(least, d);
  }
  if (found == nullptr) return "";
  return fmt::format("; if it computes what {} does, --as {} reads it so", found->architecture, found->model_type);
}

std::string supported() {
  std::string names;
  for (const FamilyRow& row : families) names += (names.empty() ? "" : ", ") + std::string(row.architecture);
  return names;
}

struct Foreign {
  const char *field, *what;  // a field of config.json that models with such layers have
};

constexpr std::array foreign_layers = {
    Foreign{"kv_lora_rank", "latent attention (MLA)"}, Foreign{"linear_num_value_heads", "gated DeltaNet layers"},
    Foreign{"state_size", "state-space layers"},       Foreign{"ssm_state_size", "state-space layers"},
    Foreign{"mamba_d_state", "state-space layers"},    Foreign{"ssm_cfg", "state-space layers"}};

// kind: "architecture", "model type".
[[noreturn]] void refuse(const JsonFields& fields, std::string_view kind, const std::string& name) {
  constexpr std::string_view kElsewhere =
      "the Python package streams a model's own modules, whatever they compute (tierflow.load, docs/python.md)";
  const std::string refused = fmt::format("the {} {} is not supported", kind, printable(name));
  for (const Foreign& each : foreign_layers)
    if (fields.find(each.field) != nullptr)
      fail_input(fields.where(), fmt::format("{}: it has {}; {}", refused, each.what, kElsewhere));
  fail_input(fields.where(),
             fmt::format("{}; supported are {}{}; {}", refused, supported(), offer(fields, name), kElsewhere));
}

}  // namespace

ModelConfig read_config(const FamilyRow& row, const JsonFields& fields, bool named) {
  const FieldsAsked asked;
  ModelConfig config;
  config.architecture = row.architecture;
  config.model_type = row.model_type;
  config.vocab_size = row.vocab_size == 0 ? fields.integer("vocab_size", 1, limits::vocab)
                                          : fields.integer_or("vocab_size", row.vocab_size, 1, limits::vocab);
  require(fields, "is_causal", true, true);
  row.read(fields, config);
  std::vector<std::string> unknown;
  if (named) find_unknown(fields.object(), asked, unknown);
  if (!unknown.empty())
    fail_input(fields.where(),
               fmt::format("--as {}: {} {} there, which no {} has", row.model_type, fmt::join(unknown, ", "),
                           unknown.size() == 1 ? "is" : "are", row.architecture));
  return config;
}

const FamilyRow& family_of(const JsonFields& fields, const std::string& as) {
  const auto named = std::ranges::find(families, as, &FamilyRow::model_type);
  if (!as.empty() && named == families.end()) {
    std::vector<std::string_view> types;
    for (const FamilyRow& row : families) types.push_back(row.model_type);
    throw Exception(io::ErrorKind::usage, fmt::format("--as {}: there is no such family; it must be one of {}",
                                                      printable(as), fmt::join(types, ", ")));
  }
  const auto checked = [&](const FamilyRow& row) -> const FamilyRow& {
    if (as.empty() || as == row.model_type) return row;
    fail(io::ErrorKind::usage, fields.where(),
         fmt::format("is that of a {}, which is read as what it is: leave --as {} out", row.architecture, as));
  };
  std::string name;
  if (const Json* list = fields.find("architectures"); list != nullptr) {
    if (!list->is_array() || list->empty() || !(*list)[0].is_string())
      fields.fail("architectures", "must be a list with the name of the model's class, one of " + supported());
    name = (*list)[0].get<std::string>();
    for (const FamilyRow& known : families)
      if (known.architecture == name) return checked(known);
    if (!as.empty()) return *named;
    refuse(fields, "architecture", name);
  }
  name = fields.text_or("model_type", "");
  for (const FamilyRow& known : families)
    if (known.model_type == name) return checked(known);
  if (!as.empty()) return *named;
  if (name.empty()) fail_input(fields.where(), "names no architecture: not the config.json of a Hugging Face model");
  refuse(fields, "model type", name);
}

bool names_family(const JsonFields& fields) {
  const Json* list = fields.find("architectures");
  const std::string type = list == nullptr ? fields.text_or("model_type", "") : "";
  return std::ranges::any_of(families, [&](const FamilyRow& row) {
    return list == nullptr ? type == row.model_type
                           : list->is_array() && !list->empty() && (*list)[0] == Json(row.architecture);
  });
}

Activation read_activation(const JsonFields& fields, const char* field, const std::string& fallback) {
  const std::string name = fields.text_or(field, fallback);
  if (name == "silu" || name == "swish") return Activation::silu;
  if (name == "gelu") return Activation::gelu;
  if (name == "gelu_new" || name == "gelu_fast" || name == "gelu_pytorch_tanh") return Activation::gelu_tanh;
  if (name == "relu") return Activation::relu;
  if (name == "relu2") return Activation::relu2;
  fields.fail(field,
              fmt::format("is \"{}\"; supported are silu, gelu, gelu_new, gelu_fast, gelu_pytorch_tanh, relu, relu2",
                          printable(name)));
}

void require(const JsonFields& fields, const char* name, bool fallback, bool value) {
  if (fields.boolean_or(name, fallback) != value) fields.fail(name, fmt::format("= {} is not supported", !value));
}

}  // namespace tierflow

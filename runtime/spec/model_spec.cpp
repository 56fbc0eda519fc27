#include "runtime/spec/model_spec.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "runtime/base/exception.h"
#include "runtime/base/files.h"
#include "runtime/base/strict_json.h"
#include "runtime/spec/model_units.h"

namespace tierflow {
namespace {

constexpr std::uint64_t config_limit = 16 << 20;
// Far above any model known, far below where a product of two overflows.
constexpr std::int64_t most_hidden = 1 << 20;
constexpr std::int64_t most_intermediate = 1 << 23;
constexpr std::int64_t most_layers = 4096;
constexpr std::int64_t most_heads = 1 << 16;
constexpr std::int64_t most_vocab = 1 << 26;
constexpr std::int64_t most_positions = 1 << 28;
constexpr std::int64_t most_parameters = std::int64_t{1} << 44;

struct Architecture {
  std::string_view name, model_type;
  Family family;
};
constexpr std::array architectures = {
    Architecture{"LlamaForCausalLM", "llama", Family::llama},
    Architecture{"MistralForCausalLM", "mistral", Family::llama},
    Architecture{"Qwen2ForCausalLM", "qwen2", Family::llama},
    Architecture{"Qwen3ForCausalLM", "qwen3", Family::llama},
    Architecture{"GPT2LMHeadModel", "gpt2", Family::gpt2},
    Architecture{"OPTForCausalLM", "opt", Family::opt},
};

std::string supported() {
  std::string names;
  for (const auto& architecture : architectures) names += (names.empty() ? "" : ", ") + std::string(architecture.name);
  return names;
}

const Architecture& architecture_of(const JsonFields& fields) {
  std::string name;
  if (const Json* list = fields.find("architectures"); list != nullptr) {
    if (!list->is_array() || list->empty() || !(*list)[0].is_string())
      fields.fail("architectures", "must be a list with the name of the model's class, one of " + supported());
    name = (*list)[0].get<std::string>();
    for (const auto& known : architectures)
      if (known.name == name) return known;
    fail_input(fields.where(),
               fmt::format("the architecture {} is not supported; supported are {}", printable(name), supported()));
  }
  name = fields.text_or("model_type", "");
  for (const auto& known : architectures)
    if (known.model_type == name) return known;
  if (name.empty()) fail_input(fields.where(), "names no architecture: not the config.json of a Hugging Face model");
  fail_input(fields.where(),
             fmt::format("the model type {} is not supported; supported are {}", printable(name), supported()));
}

Activation activation_of(const JsonFields& fields, const char* field, const std::string& fallback) {
  const std::string name = fields.text_or(field, fallback);
  if (name == "silu" || name == "swish") return Activation::silu;
  if (name == "gelu") return Activation::gelu;
  if (name == "gelu_new" || name == "gelu_pytorch_tanh") return Activation::gelu_tanh;
  if (name == "relu") return Activation::relu;
  fields.fail(field,
              fmt::format("is \"{}\"; supported are silu, gelu, gelu_new, gelu_pytorch_tanh, relu", printable(name)));
}

// transformers 5 writes rope_parameters; earlier versions rope_theta beside rope_scaling.
RopeSpec read_rope(const JsonFields& fields) {
  RopeSpec rope;
  rope.theta = fields.number_or("rope_theta", rope.theta, 1.0, 1e12);
  const char* name = fields.find("rope_parameters") != nullptr ? "rope_parameters" : "rope_scaling";
  const Json* object = fields.find(name);
  if (object == nullptr) return rope;
  if (!object->is_object()) fields.fail(name, "must be an object");
  const JsonFields scaling(*object, fields.where() + ": " + name);
  rope.theta = scaling.number_or("rope_theta", rope.theta, 1.0, 1e12);
  rope.type = scaling.text_or("rope_type", scaling.text_or("type", "default"));
  if (scaling.number_or("partial_rotary_factor", 1.0, 0.0, 1.0) != 1.0)
    scaling.fail("partial_rotary_factor", "other than 1 is not supported");
  if (rope.type == "default") return rope;
  if (rope.type != "linear" && rope.type != "llama3")
    scaling.fail("rope_type", fmt::format("is \"{}\"; supported are default, linear, llama3", printable(rope.type)));
  if (scaling.find("factor") == nullptr) scaling.fail("factor", "is missing");
  rope.factor = scaling.number_or("factor", 1.0, 1.0, 1e6);
  if (rope.type == "linear") return rope;
  for (const char* needed : {"low_freq_factor", "high_freq_factor"})
    if (scaling.find(needed) == nullptr) scaling.fail(needed, "is missing");
  rope.low_freq_factor = scaling.number_or("low_freq_factor", 1.0, 1e-6, 1e6);
  rope.high_freq_factor = scaling.number_or("high_freq_factor", 4.0, 1e-6, 1e6);
  if (!(rope.high_freq_factor > rope.low_freq_factor))
    scaling.fail("high_freq_factor", "must be above low_freq_factor");
  rope.original_max_positions = scaling.integer("original_max_position_embeddings", 1, most_positions);
  return rope;
}

// One window for all layers: 0 where attention is full. Layers that differ are not supported.
std::int64_t read_sliding_window(const JsonFields& fields, const ModelConfig& config) {
  if (config.model_type == "llama") return 0;
  const std::int64_t window = fields.integer_or("sliding_window", 0, 1, most_positions);
  if (config.model_type == "mistral") return window;
  if (!fields.boolean_or("use_sliding_window", false) || window == 0) return 0;
  std::int64_t sliding = 0;
  if (const Json* types = fields.find("layer_types"); types != nullptr) {
    if (!types->is_array() || static_cast<std::int64_t>(types->size()) != config.layers)
      fields.fail("layer_types", fmt::format("must list the attention of each of the {} layers", config.layers));
    for (const Json& type : *types) {
      if (type != "full_attention" && type != "sliding_attention")
        fields.fail("layer_types", "may hold full_attention and sliding_attention only");
      sliding += type == "sliding_attention" ? 1 : 0;
    }
  } else {
    sliding = config.layers - std::min(config.layers, fields.integer_or("max_window_layers", 28, 0, most_layers));
  }
  if (sliding != 0 && sliding != config.layers)
    fields.fail("use_sliding_window", "mixes layers of full and of sliding attention, which is not supported");
  return sliding == 0 ? 0 : window;
}

void read_llama(const JsonFields& fields, ModelConfig& c) {
  const bool llama = c.model_type == "llama", qwen2 = c.model_type == "qwen2", qwen3 = c.model_type == "qwen3";
  c.hidden_size = fields.integer("hidden_size", 1, most_hidden);
  c.intermediate_size = fields.integer("intermediate_size", 1, most_intermediate);
  c.layers = fields.integer("num_hidden_layers", 1, most_layers);
  c.heads = fields.integer("num_attention_heads", 1, most_heads);
  c.kv_heads = fields.integer_or("num_key_value_heads", c.heads, 1, most_heads);
  if (qwen3) {
    c.head_dim = fields.integer_or("head_dim", 128, 1, most_hidden);
  } else if (fields.find("head_dim") != nullptr) {
    c.head_dim = fields.integer("head_dim", 1, most_hidden);
  } else {
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
  if (c.heads * c.head_dim > 16 * most_hidden)
    fields.fail("num_attention_heads",
                fmt::format("times the head's size is {}, which is absurd", c.heads * c.head_dim));
  c.max_positions = fields.integer_or("max_position_embeddings",
                                      llama                       ? 2048
                                      : c.model_type == "mistral" ? 131072
                                                                  : 32768,
                                      1, most_positions);
  c.norm_eps = fields.number_or("rms_norm_eps", 1e-6, 0.0, 1.0);
  c.initializer_range = fields.number_or("initializer_range", 0.02, 0.0, 10.0);
  c.activation = activation_of(fields, "hidden_act", "silu");
  c.rope = read_rope(fields);
  c.tie_word_embeddings = fields.boolean_or("tie_word_embeddings", false);
  const bool attention_bias = (llama || qwen3) && fields.boolean_or("attention_bias", false);
  c.qkv_bias = qwen2 || attention_bias;
  c.output_bias = attention_bias;
  c.mlp_bias = llama && fields.boolean_or("mlp_bias", false);
  c.qk_norm = qwen3;
  c.attention_dropout = fields.number_or("attention_dropout", 0.0, 0.0, 0.999);
  c.sliding_window = read_sliding_window(fields, c);
}

void require(const JsonFields& fields, const char* name, bool fallback, bool value) {
  if (fields.boolean_or(name, fallback) != value) fields.fail(name, fmt::format("= {} is not supported", !value));
}

void check_heads(const JsonFields& fields, const char* size, ModelConfig& c) {
  if (c.hidden_size % c.heads != 0)
    fields.fail(size, fmt::format("is {}, not a multiple of the {} heads", c.hidden_size, c.heads));
  c.kv_heads = c.heads;
  c.head_dim = c.hidden_size / c.heads;
  c.qkv_bias = c.output_bias = c.mlp_bias = true;
}

void read_gpt2(const JsonFields& fields, ModelConfig& c) {
  c.hidden_size = fields.integer("n_embd", 1, most_hidden);
  c.intermediate_size = fields.integer_or("n_inner", 4 * c.hidden_size, 1, most_intermediate);
  c.layers = fields.integer("n_layer", 1, most_layers);
  c.heads = fields.integer("n_head", 1, most_heads);
  c.max_positions = fields.integer_or("n_positions", 1024, 1, most_positions);
  check_heads(fields, "n_embd", c);
  c.norm_eps = fields.number_or("layer_norm_epsilon", 1e-5, 0.0, 1.0);
  c.initializer_range = fields.number_or("initializer_range", 0.02, 0.0, 10.0);
  c.activation = activation_of(fields, "activation_function", "gelu_new");
  c.tie_word_embeddings = fields.boolean_or("tie_word_embeddings", true);
  c.embedding_dropout = fields.number_or("embd_pdrop", 0.1, 0.0, 0.999);
  c.residual_dropout = fields.number_or("resid_pdrop", 0.1, 0.0, 0.999);
  c.attention_dropout = fields.number_or("attn_pdrop", 0.1, 0.0, 0.999);
  require(fields, "scale_attn_weights", true, true);
  require(fields, "scale_attn_by_inverse_layer_idx", false, false);
  require(fields, "add_cross_attention", false, false);
}

void read_opt(const JsonFields& fields, ModelConfig& c) {
  c.hidden_size = fields.integer("hidden_size", 1, most_hidden);
  c.intermediate_size = fields.integer("ffn_dim", 1, most_intermediate);
  c.layers = fields.integer("num_hidden_layers", 1, most_layers);
  c.heads = fields.integer("num_attention_heads", 1, most_heads);
  c.max_positions = fields.integer_or("max_position_embeddings", 2048, 1, most_positions);
  check_heads(fields, "hidden_size", c);
  c.qkv_bias = c.output_bias = c.mlp_bias = fields.boolean_or("enable_bias", true);
  c.norm_eps = 1e-5;
  c.initializer_range = fields.number_or("init_std", 0.02, 0.0, 10.0);
  c.activation = activation_of(fields, "activation_function", "relu");
  c.tie_word_embeddings = fields.boolean_or("tie_word_embeddings", true);
  c.residual_dropout = fields.number_or("dropout", 0.1, 0.0, 0.999);
  c.attention_dropout = fields.number_or("attention_dropout", 0.0, 0.0, 0.999);
  c.position_offset = 2;
  c.norm_before = fields.boolean_or("do_layer_norm_before", true);
  require(fields, "_remove_final_layer_norm", false, false);
  require(fields, "layer_norm_elementwise_affine", true, true);
  if (fields.number_or("layerdrop", 0.0, 0.0, 1.0) != 0.0) fields.fail("layerdrop", "other than 0 is not supported");
  const std::int64_t projection = fields.integer_or("word_embed_proj_dim", c.hidden_size, 1, most_hidden);
  if (projection != c.hidden_size)
    fields.fail("word_embed_proj_dim",
                fmt::format("is {}, other than hidden_size {}: projected embeddings (opt-350m) are not supported",
                            projection, c.hidden_size));
}

// An upper bound, before a single tensor is named; a double cannot overflow here.
void check_size(const JsonFields& fields, const ModelConfig& c) {
  const double h = static_cast<double>(c.hidden_size);
  const double attention = 2.0 * h * static_cast<double>((c.heads + c.kv_heads) * c.head_dim);
  const double mlp = (c.family == Family::llama ? 3.0 : 2.0) * h * static_cast<double>(c.intermediate_size);
  const double tables = 2.0 * static_cast<double>(c.vocab_size) +
                        (c.family == Family::llama ? 0.0 : static_cast<double>(c.max_positions));
  const double total = static_cast<double>(c.layers) * (attention + mlp) + h * tables;
  if (total > static_cast<double>(most_parameters))
    fail_input(fields.where(), fmt::format("describes a model of {:.3g} parameters, which is absurd", total));
}

}  // namespace

std::int64_t TensorSpec::elements() const {
  std::int64_t count = 1;
  for (const std::int64_t size : shape) count *= size;
  return count;
}

std::int64_t TensorSpec::first_element() const {
  return first_row == 0 ? 0 : first_row * (elements() / shape.front());
}

std::vector<std::int64_t> TensorSpec::checkpoint_shape() const {
  std::vector<std::int64_t> whole = shape;
  if (all_rows != 0) whole.front() = all_rows;
  return whole;
}

std::int64_t UnitSpec::parameters() const {
  std::int64_t count = 0;
  for (const TensorSpec& tensor : tensors) count += tensor.elements();
  return count;
}

std::int64_t ModelSpec::parameters() const {
  std::int64_t count = 0;
  for (const UnitSpec& unit : units) count += unit.parameters();
  return count;
}

ModelSpec parse_model_spec(const std::string& config_json, const std::string& where, const Tiling& tiling) {
  if (config_json.size() > config_limit) fail_input(where, "is too long for a config.json");
  const Json root = parse_json(config_json, where);
  if (!root.is_object()) fail_input(where, "must hold one JSON object");
  const JsonFields fields(root, where);
  const Architecture& architecture = architecture_of(fields);
  if (fields.find("quantization_config") != nullptr)
    fields.fail("quantization_config",
                "is set: weights of this checkpoint are quantised; give the model it was made from");
  ModelSpec spec;
  spec.config_json = config_json;
  spec.tiling = tiling;
  ModelConfig& config = spec.config;
  config.family = architecture.family;
  config.architecture = architecture.name;
  config.model_type = architecture.model_type;
  config.vocab_size = fields.integer("vocab_size", 1, most_vocab);
  if (architecture.family == Family::llama) read_llama(fields, config);
  if (architecture.family == Family::gpt2) read_gpt2(fields, config);
  if (architecture.family == Family::opt) read_opt(fields, config);
  check_size(fields, config);
  build_units(spec);
  return spec;
}

ModelSpec read_model_spec(const std::filesystem::path& config_json, const Tiling& tiling) {
  return parse_model_spec(read_text(config_json, config_limit), config_json.string(), tiling);
}

}  // namespace tierflow

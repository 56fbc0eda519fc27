#include "runtime/spec/families.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <span>
#include <vector>

#include "runtime/base/edit_distance.h"
#include "runtime/base/exception.h"
#include "runtime/base/files.h"
#include "runtime/spec/config_limits.h"
#include "runtime/spec/decoder_fields.h"

namespace tierflow {
namespace {

const std::vector<FamilyRow>& families() {
  static const std::vector<FamilyRow> all = [] {
    std::vector<FamilyRow> rows;
    for (const std::span<const FamilyRow> table : {rms_norm_families(), layer_norm_families(), expert_families()})
      rows.insert(rows.end(), table.begin(), table.end());
    return rows;
  }();
  return all;
}

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
  for (const FamilyRow& row : families()) {
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
  for (const FamilyRow& row : families()) names += (names.empty() ? "" : ", ") + std::string(row.architecture);
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
  const auto named = std::ranges::find(families(), as, &FamilyRow::model_type);
  if (!as.empty() && named == families().end()) {
    std::vector<std::string_view> types;
    for (const FamilyRow& row : families()) types.push_back(row.model_type);
    fail_usage(
        fmt::format("--as {}: there is no such family; it must be one of {}", printable(as), fmt::join(types, ", ")));
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
    for (const FamilyRow& known : families())
      if (known.architecture == name) return checked(known);
    if (!as.empty()) return *named;
    refuse(fields, "architecture", name);
  }
  name = fields.text_or("model_type", "");
  for (const FamilyRow& known : families())
    if (known.model_type == name) return checked(known);
  if (!as.empty()) return *named;
  if (name.empty()) fail_input(fields.where(), "names no architecture: not the config.json of a Hugging Face model");
  refuse(fields, "model type", name);
}

bool names_family(const JsonFields& fields) {
  const Json* list = fields.find("architectures");
  const std::string type = list == nullptr ? fields.text_or("model_type", "") : "";
  return std::ranges::any_of(families(), [&](const FamilyRow& row) {
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

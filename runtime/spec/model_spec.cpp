#include "runtime/spec/model_spec.h"

#include <fmt/format.h>

#include <optional>

#include "runtime/base/exception.h"
#include "runtime/base/files.h"
#include "runtime/base/strict_json.h"
#include "runtime/spec/config_limits.h"
#include "runtime/spec/families.h"
#include "runtime/spec/model_units.h"
#include "runtime/spec/wrapped_config.h"

namespace tierflow {

std::int64_t ModelConfig::longest_sequence() const {
  std::int64_t most = max_positions;
  if (max_positions == 0 || !names.positions.empty()) return most;
  for (const RopeSpec& rope : ropes) {
    // With llama3 and longrope max_position_embeddings is what the model was trained to reach.
    if (rope.type != "linear" && rope.type != "yarn") continue;
    const std::int64_t from = rope.original_max_positions > 0 ? rope.original_max_positions : max_positions;
    most = std::max(most, static_cast<std::int64_t>(rope.factor * static_cast<double>(from)));
  }
  return most;
}
namespace {

constexpr std::uint64_t config_limit = 16 << 20;

// The text of a config.json of weights that are not quantised any more; the same where they were not.
std::string without_quantisation(const std::string& config_json) {
  auto plain = nlohmann::ordered_json::parse(config_json);
  bool were = false;
  const auto erase_from = [&](nlohmann::ordered_json& object) {
    were = were || (object.contains("quantization_config") && !object["quantization_config"].is_null());
    object.erase("quantization_config");
  };
  erase_from(plain);
  if (plain.contains("text_config") && plain["text_config"].is_object()) erase_from(plain["text_config"]);
  return were ? plain.dump(2) + "\n" : config_json;
}

// An upper bound, before a single tensor is named; a double cannot overflow here.
void check_size(const JsonFields& fields, const ModelConfig& c) {
  const double h = static_cast<double>(c.hidden_size);
  const double attention = 2.0 * h * static_cast<double>((c.heads + c.kv_heads) * c.head_dim);
  const double mlp = (c.gated ? 3.0 : 2.0) * h * static_cast<double>(c.intermediate_size);
  const ExpertsSpec& e = c.experts;
  const double experts = 3.0 * h * static_cast<double>(e.count * e.width + e.shared_width);
  const double tables = 2.0 * static_cast<double>(c.vocab_size) +
                        (c.names.positions.empty() ? 0.0 : static_cast<double>(c.max_positions));
  const double total = static_cast<double>(c.layers) * (attention + mlp + experts) + h * tables;
  if (c.layers * e.count > limits::experts_of_all_layers)
    fail_input(fields.where(), fmt::format("num_experts {} in {} layers is absurd", e.count, c.layers));
  if (total > static_cast<double>(limits::parameters))
    fail_input(fields.where(), fmt::format("describes a model of {:.3g} parameters, which is absurd", total));
}

// Of compressed-tensors: its fields, as its configuration has them.
void check_compressed(const JsonFields& quantised) {
  const std::string format = quantised.text_or("format", "");
  if (format != "float-quantized" && format != "int-quantized" && format != "naive-quantized")
    quantised.fail("format", fmt::format("is \"{}\"; of compressed-tensors, weights in 8 bits can be read "
                                         "(float-quantized, int-quantized): give such a folder, or the model that this "
                                         "one was made from",
                                         printable(format)));
  for (const char* more : {"transform_config", "kv_cache_scheme"})
    if (const Json* there = quantised.find(more); there != nullptr && !there->empty())
      quantised.fail(more, "must be null: weights alone may be quantised");
  const Json* groups = quantised.find("config_groups");
  if (groups == nullptr || !groups->is_object()) quantised.fail("config_groups", "must be an object");
  for (const auto& [name, group] : groups->items()) {
    const std::string where = quantised.where() + ": config_groups: " + printable(name);
    if (!group.is_object()) quantised.fail("config_groups", "must hold objects");
    const Json* weights = JsonFields(group, where).find("weights");
    if (weights == nullptr) continue;  // of activations alone
    if (!weights->is_object()) JsonFields(group, where).fail("weights", "must be an object");
    const JsonFields fields(*weights, where + ": weights");
    if (fields.integer("num_bits", 1, 64) != 8) fields.fail("num_bits", "must be 8");
    if (!fields.boolean_or("symmetric", true)) fields.fail("symmetric", "must be true");
    const std::string strategy = fields.text_or("strategy", "tensor");
    if (strategy != "tensor" && strategy != "channel" && strategy != "block")
      fields.fail("strategy", fmt::format("is \"{}\"; tensor, channel and block can be read", printable(strategy)));
    const Json* block = fields.find("block_structure");
    if (strategy == "block" && (block == nullptr || *block != Json::array({128, 128})))
      fields.fail("block_structure", "must be [128, 128]");
  }
}

}  // namespace

void check_quantised(const std::string& quantization_config, const std::string& where) {
  const Json config = parse_json(quantization_config, where);
  if (!config.is_object()) JsonFields(config, where).fail("quantization_config", "must be an object");
  const JsonFields quantised(config, where + ": quantization_config");
  const std::string method = quantised.text_or("quant_method", "");
  if (method == "compressed-tensors") return check_compressed(quantised);
  if (method != "bitsandbytes" && method != "fp8" && method != "fbgemm_fp8" && method != "mxfp4")
    quantised.fail(
        "quant_method",
        fmt::format("is \"{}\"; weights quantised with bitsandbytes, fp8, fbgemm_fp8, mxfp4 or compressed-tensors can "
                    "be read: give such a folder, or the model that this one was made from",
                    printable(method)));
  const Json* block = quantised.find("weight_block_size");
  if (method == "fp8" && block != nullptr && !block->is_null() && *block != Json::array({128, 128}))
    quantised.fail("weight_block_size", "must be [128, 128], or null for weights with one scale");
}

std::int64_t TensorSpec::elements() const {
  std::int64_t count = 1;
  for (const std::int64_t size : shape) count *= size;
  return count;
}

std::uint64_t TensorSpec::words() const {
  return format == WeightFormat::bf16 ? static_cast<std::uint64_t>(elements()) : stored_bytes(format, shape) / 2;
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

ModelSpec parse_model_spec(const std::string& config_json, const std::string& where, const Tiling& tiling,
                           const std::string& as) {
  if (config_json.size() > config_limit) fail_input(where, "is too long for a config.json");
  const Json root = parse_json(config_json, where);
  if (!root.is_object()) fail_input(where, "must hold one JSON object");
  const JsonFields fields(root, where);
  if (const std::optional<std::string> text = text_config(root, config_json, where, as)) {
    ModelSpec spec = parse_model_spec(*text, where + ": text_config", tiling, as);
    const Json* names = fields.find("architectures");
    const bool named = names != nullptr && names->is_array() && !names->empty() && (*names)[0].is_string();
    spec.wrapper = named ? (*names)[0].get<std::string>() : fields.text_or("model_type", "a wrapper");
    spec.wrapper_config_json = without_quantisation(config_json);
    return spec;
  }
  const FamilyRow& row = family_of(fields, as);
  ModelSpec spec;
  spec.config_json = without_quantisation(config_json);
  if (const Json* quantised = fields.find("quantization_config"); quantised != nullptr)
    check_quantised(quantised->dump(), fields.where());
  spec.tiling = tiling;
  spec.read_as = as;
  spec.config = read_config(row, fields, /*named=*/!names_family(fields));
  check_size(fields, spec.config);
  build_units(spec);
  return spec;
}

namespace {

// Whether it could be the name of a repository on the Hugging Face Hub: OWNER/NAME.
bool is_hub_name(const std::string& text) {
  const std::size_t slash = text.find('/');
  return slash != std::string::npos && slash != 0 && slash + 1 < text.size() &&
         text.find('/', slash + 1) == text.npos && text.front() != '.' && text.front() != '~';
}

}  // namespace

void expect_model_folder(const std::filesystem::path& folder) {
  std::error_code unknown;
  const std::string text = folder.string();
  if (!std::filesystem::exists(folder, unknown) && !unknown)
    fail_input(text, "there is no such folder; a model is a folder with config.json and safetensors" +
                         (is_hub_name(text) ? ". `hf download " + text + " --local-dir " + folder.filename().string() +
                                                  "` fetches it from the Hugging Face Hub, if it is a name there"
                                            : std::string()));
  if (std::filesystem::exists(folder, unknown) && !std::filesystem::is_directory(folder, unknown))
    fail_input(text, "is a file; a model is a folder with config.json and safetensors");
  if (std::filesystem::is_directory(folder, unknown) && !std::filesystem::exists(folder / "config.json", unknown) &&
      !unknown)
    fail_input(text, std::filesystem::exists(folder / "adapter_config.json", unknown)
                         ? "holds adapters, which are no whole model: `tierflow merge --adapter " + text +
                               " --out merged` makes one of them and their base; generate and eval also take --model "
                               "BASE --adapter " +
                               text
                         : "has no config.json: a model is a folder with config.json and safetensors");
}

ModelSpec read_model_spec(const std::filesystem::path& config_json, const Tiling& tiling, const std::string& as) {
  return parse_model_spec(read_text(config_json, config_limit), config_json.string(), tiling, as);
}

ModelSpec read_folder_spec(const std::filesystem::path& folder, const Tiling& tiling, const std::string& as) {
  expect_model_folder(folder);
  const std::filesystem::path path = folder / "config.json";
  return parse_model_spec(read_text(open_beneath(folder, "config.json"), path, config_limit), path.string(), tiling,
                          as);
}

}  // namespace tierflow

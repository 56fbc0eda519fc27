#include "runtime/spec/wrapped_config.h"

#include <array>

#include "runtime/spec/families.h"

namespace tierflow {

std::optional<std::string> text_config(const Json& root, const std::string& config_json, const std::string& where,
                                       const std::string& as) {
  const JsonFields fields(root, where);
  const Json* inner = fields.find("text_config");
  if (inner == nullptr) return std::nullopt;
  if (!inner->is_object()) fields.fail("text_config", "must be an object");
  const JsonFields inside(*inner, where + ": text_config");
  const FamilyRow& row = family_of(inside, as);
  if (!names_family(inside)) read_config(row, inside, /*named=*/true);  // what is made of it names the row
  const auto whole = nlohmann::ordered_json::parse(config_json);
  nlohmann::ordered_json text = {{"architectures", {row.architecture}}};
  for (const auto& [name, value] : whole["text_config"].items())
    if (name != "architectures") text[name] = value;
  for (const char* name : {"tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "dtype",
                           "torch_dtype", "quantization_config", "transformers_version"})
    if (whole.contains(name) && (!text.contains(name) || text[name].is_null())) text[name] = whole[name];
  // Who ties is the wrapper, where it says that nobody does.
  if (whole.contains("tie_word_embeddings") && whole["tie_word_embeddings"] == false)
    text["tie_word_embeddings"] = false;
  return text.dump(2) + "\n";
}

bool wraps_with_head(std::string_view wrapper) {
  return wrapper == "Llama4ForConditionalGeneration";
}

bool is_beside_text(std::string_view tensor) {
  constexpr std::array parts = {"vision_tower.",          "vision_model.", "multi_modal_projector.",
                                "multi_modal_projector_", "visual.",       "audio_tower.",
                                "embed_vision.",          "embed_audio.",  "vision_embed_tokens."};
  if (constexpr std::string_view model = "model."; tensor.starts_with(model)) tensor.remove_prefix(model.size());
  for (const std::string_view part : parts)
    if (tensor.starts_with(part)) return true;
  return false;
}

}  // namespace tierflow

#pragma once
// Models of text and other things: their config.json holds the text model's as text_config, and their folders its
// tensors under a longer name beside those of a vision tower. The text model alone is what is trained and exported.
#include <optional>
#include <string>
#include <string_view>

#include "runtime/base/strict_json.h"

namespace tierflow {

// The config.json of the text model within `root`, whose text is `config_json`; nothing if there is none. as: as in
// family_of(). Throws Exception (kind input) where its family is not supported.
std::optional<std::string> text_config(const Json& root, const std::string& config_json, const std::string& where,
                                       const std::string& as);

// Whether models of the class `wrapper` have the text model with its head as language_model; others have it without its
// head as model.language_model.
bool wraps_with_head(std::string_view wrapper);

// Whether a tensor belongs to a part that is not the text model: a vision or audio tower, a projector.
bool is_beside_text(std::string_view tensor);

}  // namespace tierflow

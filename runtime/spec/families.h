#pragma once
// The model families. Each has a row in a table, with a function that reads its config.json. docs/models.md says how to
// add one.
#include <span>
#include <string>
#include <string_view>

#include "runtime/base/strict_json.h"
#include "runtime/spec/model_spec.h"

namespace tierflow {

struct FamilyRow {
  std::string_view architecture, model_type;  // as config.json has them
  // Fills the configuration, except for the two names above and vocab_size. Throws Exception (kind input).
  void (*read)(const JsonFields& fields, ModelConfig& config);
  std::int64_t vocab_size = 0;  // the default if config.json has none; 0: config.json must have one
};

// The row that config.json names, or the one of model_type `as` where it names none that is known. Throws Exception
// (kind input, usage for `as`) that lists what there is, and offers a family that has every field there.
const FamilyRow& family_of(const JsonFields& fields, const std::string& as = "");
// Whether config.json itself names a family that has a row.
bool names_family(const JsonFields& fields);
// Reads the config.json of a model of that family. Throws Exception (kind input). named: the family was named for an
// unknown architecture; then every field must be one that the family has.
ModelConfig read_config(const FamilyRow& row, const JsonFields& fields, bool named);

// The families of decoders: a table at the end of each of three files.
std::span<const FamilyRow> rms_norm_families();    // decoder_families.cpp
std::span<const FamilyRow> layer_norm_families();  // layer_norm_families.cpp
std::span<const FamilyRow> expert_families();      // expert_families.cpp

// Readers of dense families that readers of mixtures of experts use.
void read_llama(const JsonFields& fields, ModelConfig& config);
void read_mistral(const JsonFields& fields, ModelConfig& config);
void read_qwen2(const JsonFields& fields, ModelConfig& config);
void read_qwen3(const JsonFields& fields, ModelConfig& config);
void read_glm(const JsonFields& fields, ModelConfig& config);
void read_granite(const JsonFields& fields, ModelConfig& config);
void read_gpt_oss_attention(const JsonFields& fields, ModelConfig& config);  // all but its experts

Activation read_activation(const JsonFields& fields, const char* field, const std::string& fallback);
// Throws Exception (kind input) if the field is not `value`.
void require(const JsonFields& fields, const char* name, bool fallback, bool value);

}  // namespace tierflow

#pragma once
// The model families: a row each in a table, with a function that reads what its config.json says. How one is added:
// docs/models.md.
#include <span>
#include <string>
#include <string_view>

#include "runtime/base/strict_json.h"
#include "runtime/spec/model_spec.h"

namespace tierflow {

struct FamilyRow {
  std::string_view architecture, model_type;  // as config.json has them
  // Fills all but what both names say and vocab_size. Throws Exception (kind input).
  void (*read)(const JsonFields& fields, ModelConfig& config);
  std::int64_t vocab_size = 0;  // where config.json gives none; 0: it must
};

// The row that config.json names, or the one of model_type `as` where it names none that is known. Throws Exception
// (kind input, usage for `as`) that lists what there is, and offers a family that has every field there.
const FamilyRow& family_of(const JsonFields& fields, const std::string& as = "");
// Whether config.json itself names a row.
bool names_family(const JsonFields& fields);
// What config.json says of a model of that family. Throws Exception (kind input). named: the family was named for an
// architecture that is not known; then every field there has to be one that the family has.
ModelConfig read_config(const FamilyRow& row, const JsonFields& fields, bool named);

// The families of decoders: a table at the end of each of three files.
std::span<const FamilyRow> rms_norm_families();    // decoder_families.cpp
std::span<const FamilyRow> layer_norm_families();  // layer_norm_families.cpp
std::span<const FamilyRow> expert_families();      // expert_families.cpp

// Dense families that mixtures of experts begin with.
void read_llama(const JsonFields& fields, ModelConfig& config);
void read_mistral(const JsonFields& fields, ModelConfig& config);
void read_qwen2(const JsonFields& fields, ModelConfig& config);
void read_qwen3(const JsonFields& fields, ModelConfig& config);
void read_glm(const JsonFields& fields, ModelConfig& config);
void read_granite(const JsonFields& fields, ModelConfig& config);
void read_gpt_oss_attention(const JsonFields& fields, ModelConfig& config);  // all but its experts

Activation read_activation(const JsonFields& fields, const char* field, const std::string& fallback);
// Throws Exception (kind input) where the field is not `value`.
void require(const JsonFields& fields, const char* name, bool fallback, bool value);

}  // namespace tierflow

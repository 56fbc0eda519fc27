#pragma once
// The model families: a row each in a table, with a function that reads what its config.json says beside the common
// fields. A family of decoders is added here and in two files of tests alone (docs/models.md).
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

// Of decoder_families.cpp.
void read_llama(const JsonFields& fields, ModelConfig& config);
void read_mistral(const JsonFields& fields, ModelConfig& config);
void read_ministral3(const JsonFields& fields, ModelConfig& config);
void read_qwen2(const JsonFields& fields, ModelConfig& config);
void read_qwen3(const JsonFields& fields, ModelConfig& config);
void read_gemma(const JsonFields& fields, ModelConfig& config);
void read_gemma2(const JsonFields& fields, ModelConfig& config);
void read_gemma3(const JsonFields& fields, ModelConfig& config);
void read_phi3(const JsonFields& fields, ModelConfig& config);
void read_glm(const JsonFields& fields, ModelConfig& config);
void read_glm4(const JsonFields& fields, ModelConfig& config);
void read_olmo2(const JsonFields& fields, ModelConfig& config);
void read_olmo3(const JsonFields& fields, ModelConfig& config);
void read_smollm3(const JsonFields& fields, ModelConfig& config);
void read_granite(const JsonFields& fields, ModelConfig& config);
void read_cohere(const JsonFields& fields, ModelConfig& config);
void read_cohere2(const JsonFields& fields, ModelConfig& config);
void read_gpt_neox(const JsonFields& fields, ModelConfig& config);
void read_glm130b(const JsonFields& fields, ModelConfig& config);
void read_starcoder2(const JsonFields& fields, ModelConfig& config);
void read_seed_oss(const JsonFields& fields, ModelConfig& config);
void read_exaone4(const JsonFields& fields, ModelConfig& config);
void read_arcee(const JsonFields& fields, ModelConfig& config);
void read_ernie(const JsonFields& fields, ModelConfig& config);
void read_gpt_oss_attention(const JsonFields& fields, ModelConfig& config);  // all but its experts

// Of expert_families.cpp.
void read_mixtral(const JsonFields& fields, ModelConfig& config);
void read_qwen2_moe(const JsonFields& fields, ModelConfig& config);
void read_qwen3_moe(const JsonFields& fields, ModelConfig& config);
void read_olmoe(const JsonFields& fields, ModelConfig& config);
void read_granite_moe(const JsonFields& fields, ModelConfig& config);
void read_glm4_moe(const JsonFields& fields, ModelConfig& config);
void read_gpt_oss(const JsonFields& fields, ModelConfig& config);

Activation read_activation(const JsonFields& fields, const char* field, const std::string& fallback);
// Throws Exception (kind input) where the field is not `value`.
void require(const JsonFields& fields, const char* name, bool fallback, bool value);

}  // namespace tierflow

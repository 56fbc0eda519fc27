#pragma once
// The specification of the model that the options name, with what is trained of it.
#include <string>
#include <utility>
#include <vector>

#include "runtime/planning/left_store.h"
#include "runtime/program/options.h"
#include "runtime/spec/model_spec.h"

namespace tierflow {

// The specification of --model or --config with its adapters, frozen tensors and learning rates; for a
// preference loss without dropout, as TRL trains with one. Of a base in kOwnFormat base_format says what that is.
// Throws Exception (usage) if --sequence-length exceeds the model's positions.
ModelSpec training_spec(const TrainOptions& options);
// The options of a run that resumes the state in these folders: a base in kOwnFormat keeps the format that it has
// there.
TrainOptions with_base_of(const Folders& state, TrainOptions options);
// By regular expression for a tensor's name, those of LoRA+ included.
std::vector<std::pair<std::string, double>> learning_rate_scales(const TrainOptions& options);

}  // namespace tierflow

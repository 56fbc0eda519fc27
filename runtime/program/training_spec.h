#pragma once
// What is trained of the model that the options name.
#include <string>
#include <utility>
#include <vector>

#include "runtime/program/options.h"
#include "runtime/spec/model_spec.h"

namespace tierflow {

// The specification of --model or --config with its adapters, frozen tensors and learning rates; for a
// preference loss without dropout, as TRL trains with one. Throws Exception (usage) where --sequence-length exceeds the
// model's positions.
ModelSpec training_spec(const TrainOptions& options);
// By regular expression for a tensor's name, those of LoRA+ included.
std::vector<std::pair<std::string, double>> learning_rate_scales(const TrainOptions& options);

}  // namespace tierflow

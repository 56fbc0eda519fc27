#pragma once
// What `train` and `eval` share: the device, the model and the data that the options mean.
#include <memory>

#include "runtime/batches/data_batches.h"
#include "runtime/data/data.h"
#include "runtime/program/options.h"
#include "runtime/program/training_log.h"
#include "runtime/session/session.h"

namespace tierflow {

// Puts torch's memory under the budget's allocator and sets its threads (0: as they are): before the first tensor.
// Returns what the device's use takes of it beside tensors.
std::uint64_t prepare_torch(const std::string& device, int threads);
// The model in a folder, read as `as` says (read_model_spec), with a folder of adapters, if one is named, over a base
// in that format.
Model load_with(const std::filesystem::path& model, const std::filesystem::path& adapter,
                const std::string& base_precision, const std::string& as);
// The model that the options train. spec: training_spec(options).
Model training_model(const TrainOptions& options, const ModelSpec& spec);
// Warns where a folder of adapters, if one is named, is for other weights than those of the model.
void say_if_for_other_weights(const std::filesystem::path& adapter, const std::filesystem::path& model,
                              const std::string& as, TrainingLog& log);
// The same, and warns where such a folder has another chat template than the model, and no option chose one.
void say_what_differs(const std::filesystem::path& adapter, const DataChoice& options, TrainingLog& log);
// Warns of DataOptions::lacks_tokenizer.
void say_if_bytes_are_tokens(const DataOptions& options, TrainingLog& log);
// The data, prepared; what became of them is said.
Dataset prepare_data(DataOptions options, TrainingLog& log);
// Says which device it is; steps in the log tell what a card does from then on.
void announce_device(const RunOptions& options, const SessionOptions& settings, TrainingLog& log);

}  // namespace tierflow

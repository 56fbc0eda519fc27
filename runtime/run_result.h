#pragma once
// The model folder that a run writes.
#include <filesystem>

#include "runtime/options.h"
#include "runtime/session.h"

namespace tierflow {

// Throws Exception where `out` is something else than a new or an empty folder.
void check_out(const std::filesystem::path& out);

// The folder --out: weights, config.json, the tokenizer's files of the model trained, and the run's options.
void write_result_folder(Session& session, const TrainOptions& options, const Progress& progress);

}  // namespace tierflow

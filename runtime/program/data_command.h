#pragma once
// `tierflow data prepare` and `tierflow data preview`: what the data come to before anything is trained. They need no
// LibTorch.
#include "runtime/program/options.h"

namespace tierflow {

// Print on standard output. Return the exit code; throw Exception where the data are not what they are said to be.
int run_data_prepare(const DataCommandOptions& options);
int run_data_preview(const DataCommandOptions& options);

}  // namespace tierflow

#pragma once
// `tierflow data prepare` and `tierflow data preview`: prepare and show data before anything is trained. They need no
// LibTorch.
#include "runtime/program/options.h"

namespace tierflow {

// Each prints on standard output and returns the exit code. Throws Exception if the data are malformed.
int run_data_prepare(const DataCommandOptions& options);
int run_data_preview(const DataCommandOptions& options);

}  // namespace tierflow

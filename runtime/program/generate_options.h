#pragma once
// The options of `tierflow generate`.
#include "runtime/program/option_table.h"
#include "runtime/program/options.h"

namespace tierflow {

OptionTable generate_table(GenerateOptions& options);

}  // namespace tierflow

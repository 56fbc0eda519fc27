#pragma once
// The options of adapters.
#include "runtime/program/option_table.h"
#include "runtime/program/options.h"

namespace tierflow {

void add_base_precision(OptionTable& table, std::string& precision);
// Which weights are trained, and how fast.
void add_trained_rows(OptionTable& table, TrainOptions& options);
void add_adapter_rows(OptionTable& table, TrainOptions& options);
// The configuration of --method galore. Its layers are named like those that get adapters.
AdapterConfig galore_config(const TrainOptions& options);
// Throws Exception (kind usage) for options that contradict each other. given_first: the first option of adapters that
// was given, "--name".
void check_adapter(const TrainOptions& options, const std::string& given_first);
OptionTable merge_table(MergeOptions& options);

}  // namespace tierflow

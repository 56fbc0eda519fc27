#pragma once
// The options of adapters.
#include "runtime/program/option_table.h"
#include "runtime/program/options.h"

namespace tierflow {

void add_base_precision(OptionTable& table, std::string& precision, std::vector<std::string> besides = {});
// Which weights are trained, and how fast.
void add_trained_rows(OptionTable& table, TrainOptions& options);
void add_adapter_rows(OptionTable& table, TrainOptions& options);
// What --method galore makes of the model; it names layers as those that get adapters are named.
AdapterConfig galore_config(const TrainOptions& options);
// Throws Exception (kind usage) for what contradicts itself.
void check_adapter(const TrainOptions& options);
OptionTable merge_table(MergeOptions& options);

}  // namespace tierflow

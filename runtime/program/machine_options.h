#pragma once
// The options that choose where a run computes and keeps its state.
#include "runtime/program/option_table.h"
#include "runtime/program/options.h"

namespace tierflow {

inline constexpr const char* kMachine = "Machine, budgets and storage";  // heading of the help

void add_machine_rows(OptionTable& table, RunOptions& options);
// Throws Exception (kind usage) for options that contradict each other or do not fit this machine.
void check_machine(const RunOptions& options);

}  // namespace tierflow

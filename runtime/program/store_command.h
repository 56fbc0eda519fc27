#pragma once
// `tierflow status` and `tierflow verify`: what a run left in its storage folders, and whether it is whole. They write
// nothing and need no LibTorch.
#include "runtime/program/options.h"

namespace tierflow {

// Print on standard output. Return the exit code; throw Exception where there is no state, another process holds it, or
// (verify) it is damaged.
int run_status(const StoreCommandOptions& options);
int run_verify(const StoreCommandOptions& options);

}  // namespace tierflow

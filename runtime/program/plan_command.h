#pragma once
// `tierflow plan`: what a training run would take of memory, storage and time on this machine. Loads no weights;
// LibTorch only where something has to be measured.
#include <functional>

#include "runtime/program/train.h"

namespace tierflow {

// Prints the plan on standard output, what is being measured on standard error. `measure` does a job with LibTorch.
// Returns the exit code; throws Exception.
int run_plan(const PlanOptions& options, const std::function<void(const ProfileJob&)>& measure);

}  // namespace tierflow

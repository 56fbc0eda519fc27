#pragma once
// Device, budgets and storage of a session, chosen where the program's options leave them open. No torch here.
#include <string>

#include "runtime/base/progress.h"
#include "runtime/planning/machine_model.h"
#include "runtime/planning/session_options.h"
#include "runtime/program/options.h"

namespace tierflow {

// `say` gets a line about what was chosen. Throws Exception (usage) if the budgets exceed what is free.
// device_fixed: what the device's use takes of it beside tensors; comes on top of a budget that is left open.
SessionOptions session_settings(const RunOptions& options, std::uint64_t device_fixed, const Say& say);
// Throws Exception (usage) if a budget of a card's memory is more than what it has: `fixed`, which the device's use has
// taken already, and `free` bytes (0: unknown).
void check_device_memory(std::uint64_t asked, std::uint64_t fixed, std::uint64_t free);
// With what training adds.
SessionOptions train_settings(const TrainOptions& options, std::uint64_t device_fixed, const Say& say);
// The same for a machine that is not here: its device and drives, and its budgets where the options leave them open.
// Throws Exception (usage) if the options name a device or drives of this one, or budgets that it has not.
SessionOptions train_settings(const TrainOptions& options, const MachineModel& machine, const Say& say);
// "cpu" or "cuda": what --device means here.
std::string device_of(const RunOptions& options);

}  // namespace tierflow

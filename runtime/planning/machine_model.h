#pragma once
// Machines that are not here: cards, hosts and drives by published rates, and the time and memory that a model's stages
// would take on them. The result is a Profile as if it had been measured. No torch here.
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/planning/profile.h"

namespace tierflow {

// A number about a machine, and its source.
struct Figure {
  double value = 0;
  std::string source;
};

// Rates are what work of ordinary sizes reaches, not the maximum of a data sheet. In bytes and operations a second.
struct CardModel {
  Figure products;          // bf16 with fp32 sums
  Figure attention;         // head size 128, causal
  Figure memory_rate;       // of the card's own memory
  Figure memory;            // bytes
  Figure upload, download;  // of its link, both at once
  Figure launch;            // seconds of the host for a kernel
  Figure context;           // bytes that its use takes besides tensors
};
struct HostModel {
  Figure memory_rate;  // of all readers and writers together
  Figure memory;       // bytes
  Figure cores;
  Figure update;    // parameters a second on one core, in its caches
  Figure measure;   // the same for the gradient's norm
  Figure checksum;  // bytes a second on one core
};
struct DriveModel {
  Figure read, write;  // of one drive
};

struct MachineModel {
  std::string name;
  CardModel card;
  HostModel host;
  DriveModel drive;
  int drives = 0;

  // All its figures with their names, in the order of a report: "card products", ...
  std::vector<std::pair<std::string, Figure>> figures() const;
};

// CARD-RAMgb[-Nnvme]: rtx4090-128gb-2nvme has a 4090, 128 GiB of RAM and two drives on PCIe 4; 4nvme5 would be four on
// PCIe 5. Throws Exception (kind usage), which says which names there are.
MachineModel find_machine(const std::string& name);

// The profile that measure_machine() would give on that machine.
MachineProfile machine_profile(const MachineModel& machine);
// The profile that measure_model() would give on that machine.
ModelProfile model_profile(const ModelSpec& spec, const SessionOptions& options, const MachineModel& machine);

// The budgets of a run without budgets: nine tenths of what the card's context leaves, and seven eighths of the RAM.
std::uint64_t device_budget(const MachineModel& machine);
std::uint64_t host_budget(const MachineModel& machine);

}  // namespace tierflow

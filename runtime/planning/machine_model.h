#pragma once
// Machines that are not there: cards, hosts and drives by published rates, and what a model's stages would take on
// them. What follows is a Profile as if it had been measured. No torch here.
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/planning/profile.h"

namespace tierflow {

// A number of a machine, and where it is from.
struct Figure {
  double value = 0;
  std::string source;
};

// Rates are what work of ordinary sizes reaches, not the most that a data sheet names. Bytes and operations a second.
struct CardModel {
  Figure products;          // bf16 with fp32 sums
  Figure attention;         // head size 128, causal
  Figure memory_rate;       // of the card's own memory
  Figure memory;            // bytes
  Figure upload, download;  // of its link, both at once
  Figure launch;            // seconds of the host for a kernel
  Figure context;           // bytes that its use takes beside tensors
};
struct HostModel {
  Figure memory_rate;  // all that reads or writes there, together
  Figure memory;       // bytes
  Figure cores;
  Figure update;    // parameters a second on one core, in its caches
  Figure measure;   // likewise, of the gradient's norm
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

  // What it names, in the order of a report: "card products", ...
  std::vector<std::pair<std::string, Figure>> figures() const;
};

// CARD-RAMgb[-Nnvme]: rtx4090-128gb-2nvme has a 4090, 128 GiB of RAM and two drives on PCIe 4; 4nvme5 would be four on
// PCIe 5. Throws Exception (kind usage) that says which there are.
MachineModel find_machine(const std::string& name);

// What measure_machine() would find there.
MachineProfile machine_profile(const MachineModel& machine);
// What measure_model() would find there.
ModelProfile model_profile(const ModelSpec& spec, const SessionOptions& options, const MachineModel& machine);

// The budgets of a run that names none: nine tenths of what the card's context leaves, and seven eighths of the RAM.
std::uint64_t device_budget(const MachineModel& machine);
std::uint64_t host_budget(const MachineModel& machine);

}  // namespace tierflow

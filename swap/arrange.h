#pragma once
// Budgets into an arrangement.
#include <cstdint>
#include <vector>

#include "io/error.h"
#include "swap/arrangement.h"

namespace tierflow::swap {

struct ArrangeRequest {
  std::uint64_t host_budget = 0;
  std::uint64_t host_workspace = 0;  // of the host budget: for the client, besides what is arranged
  std::uint64_t device_budget = 0;
  std::uint64_t workspace = 0;  // of the device budget: for computing a stage, besides weights and gradients
  // Of the device budget, besides `workspace`: what an evaluation could use with more micro-batches at once. It is left
  // free where the device does not hold all weights, from at most half of what would keep more of them there; saved
  // inputs and kept activations of a step count as a part of it.
  std::uint64_t evaluation_workspace = 0;
  // By stage: bytes of one micro-batch's activations where the stage can keep them, 0 where it cannot. Empty: none can.
  std::vector<std::uint64_t> activation_bytes;
  // By stage: how many of those bytes are swapped; 0 where they cannot be. Empty: none can.
  std::vector<std::uint64_t> swapped_bytes;
  std::uint64_t swap_workspace = 0;  // further workspace of a stage whose activations are swapped
  // How many items swap their activations to the host, and how many to storage. The last items keep theirs on the
  // device. The items before them go to the host, and the items before those to storage: as many as there are and fit.
  int swap_to_host = 0, swap_to_storage = 0;
  int micro_batches = 1;
  bool staged = true;
  // Where nothing is staged: the share of the updates that is deferred, evenly in all units. It becomes less where
  // everything must be resident and the gradients would not fit.
  double deferred_share = 0;
  // The share of the units whose updates run on the device, where it has room. An update that is not deferred needs the
  // weights on the device in the backward; an embedding has none there, so the host runs its update then.
  double device_update_share = 0;
  std::uint64_t update_scratch = 0;  // bytes that the client needs in each update slot
  // Gradients are rounded in slots of the device before they are copied to the host, where it has room for the slots.
  bool gradient_slots = false;
  // Bytes that measuring a gradient leaves; where there are slots, it is measured there. 0: on the host.
  std::uint64_t found_bytes = 0;
  // Optimizer state of units stays on the device for the whole run, with gradients that wait, where it has room beside
  // all else: first units first. They are then updated there. Not with `sums`.
  bool state_on_device = false;
  bool storage = true;   // false: everything must be resident
  bool train = true;     // false: forward only
  bool sums = false;     // for VisitPlanner: gradients of several visits add up on the host
  int needed_units = 1;  // units on demand that one need names, at most; VisitPlanner alone plans needs
};
// An arrangement within the budgets, or an error of kind usage that names the smallest budget that works.
io::Result<Arrangement> arrange(const Layout& layout, const ArrangeRequest& request);

}  // namespace tierflow::swap

#pragma once
// Turns budgets into an arrangement: sizes of buffers, what is resident, where activations wait, which updates are
// deferred.
#include <cstdint>
#include <vector>

#include "io/error.h"
#include "swap/arrangement.h"

namespace tierflow::swap {

struct ArrangeRequest {
  std::uint64_t host_budget = 0;     // bytes
  std::uint64_t host_workspace = 0;  // bytes of the host budget that the client needs besides what is arranged
  std::uint64_t device_budget = 0;   // bytes
  std::uint64_t workspace = 0;  // bytes of the device budget that computing a stage needs besides weights and gradients
  // Further bytes of the device budget that an evaluation could use to compute more micro-batches at once. If the
  // device does not hold all weights, this room is left free; it takes at most half of the room that would keep more
  // weights there. Saved inputs and kept activations of a step count as a part of it.
  std::uint64_t evaluation_workspace = 0;
  // By stage: bytes of one micro-batch's activations if the stage can keep them, else 0. Empty: no stage can.
  std::vector<std::uint64_t> activation_bytes;
  // By stage: how many of those bytes are swapped; 0 if the stage cannot swap. Empty: no stage can.
  std::vector<std::uint64_t> swapped_bytes;
  std::uint64_t swap_workspace = 0;  // further workspace of a stage whose activations are swapped
  // How many items swap their activations to the host, and how many to storage. The last items keep their activations
  // on the device. The items before them go to the host, and the items before those to storage, as far as there are
  // such items and they fit.
  int swap_to_host = 0, swap_to_storage = 0;
  int micro_batches = 1;
  bool staged = true;
  // Only if nothing is staged: the share of the updates that is deferred, evenly in all units. It becomes less if
  // everything must be resident and the gradients would not fit.
  double deferred_share = 0;
  // The share of the units whose updates run on the device, if it has room. An update that is not deferred needs the
  // weights on the device in the backward. An embedding has no weights there in the backward, so the host runs its
  // update then.
  double device_update_share = 0;
  std::uint64_t update_scratch = 0;  // bytes that the client needs in each update slot
  // Gradients are rounded in slots of the device before they are copied to the host, if it has room for the slots.
  bool gradient_slots = false;
  // Bytes of what measuring one gradient finds. If there are gradient slots, gradients are measured there. 0: the host
  // measures.
  std::uint64_t measured_bytes = 0;
  // Optimizer state of whole units, and their gradients that wait, stay on the device for the whole run, as far as it
  // has room beside everything else; the first units come first. These units are updated there. Not with `sums`.
  bool state_on_device = false;
  bool storage = true;     // false: everything must be resident
  bool train = true;       // false: forward only
  bool sums = false;       // for VisitPlanner: gradients of several visits add up on the host
  int units_per_need = 1;  // the most units on demand that one need names; only VisitPlanner plans needs
};
// An arrangement within the budgets, or an error of kind usage that names the smallest budget that works.
io::Result<Arrangement> arrange(const Layout& layout, const ArrangeRequest& request);

}  // namespace tierflow::swap

#pragma once
// Budgets into an arrangement.
#include <cstdint>
#include <vector>

#include "io/error.h"
#include "swap/arrangement.h"

namespace tierflow::swap {

struct ArrangeRequest {
  std::uint64_t host_budget = 0;
  std::uint64_t device_budget = 0;
  std::uint64_t workspace = 0;  // of the device budget: what computing a stage takes besides weights and gradients
  // By stage: bytes of one micro-batch's activations where the stage can keep them, 0 where it cannot. Empty: none can.
  std::vector<std::uint64_t> activation_bytes;
  // By stage: bytes of what is swapped of them, 0 where they cannot be. Empty: none can.
  std::vector<std::uint64_t> swapped_bytes;
  std::uint64_t swap_workspace = 0;  // what computing a stage takes more where its activations are swapped
  // How many items swap their activations to the host and to storage, of those that do not keep them. The last ones
  // stay on the device, those before them go to the host, those before to storage: as many as there are and fit.
  int swap_to_host = 0, swap_to_storage = 0;
  int micro_batches = 1;
  bool staged = true;
  // Of the updates, where nothing is staged: which share is deferred, evenly in all units. Less where everything has to
  // be resident and the gradients would not fit.
  double deferred_share = 0;
  // Of the units: whose updates run on the device where it has room. An update at once needs weights on the device in
  // the backward, so that of an embedding is not concerned.
  double device_update_share = 0;
  std::uint64_t update_scratch = 0;  // bytes that the client needs in each update slot
  bool storage = true;               // false: everything must be resident
  bool train = true;                 // false: forward only
  bool sums = false;                 // for VisitPlanner: gradients of several visits add up on the host
};
// An arrangement within the budgets, or an error of kind usage that names the smallest budget that works.
io::Result<Arrangement> arrange(const Layout& layout, const ArrangeRequest& request);

}  // namespace tierflow::swap

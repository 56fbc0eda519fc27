#pragma once
// Plans visit by visit, for a client that chooses its own order. Each call gives the tasks of one visit, and fetches
// what followed it the last time. Nothing further ahead is fixed, so a client that departs from its former order only
// loses time. The gradients of a unit add up on the host until owe() or drop().
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "io/error.h"
#include "swap/fetcher.h"

namespace tierflow::swap {

struct VisitRequest {
  int stage = 0;
  Pass pass = Pass::forward;    // head: forward and backward in one visit
  std::vector<bool> gradients;  // backward and head, by unit of the stage: whether the visit adds to its gradient; of
                                // trainable units alone
  // backward and head: the next visit is the same stage and pass for another micro-batch. The gradients of both then
  // add up in fp32 on the device and leave it once, rounded to bf16. Without it, each visit's gradient is rounded to
  // bf16 and leaves the device, and the host adds up in fp32.
  bool gradients_stay = false;
  // How many micro-batches the visit and each of its parts compute, one after the other. More than one is possible only
  // in passes without gradients.
  int micro_batches = 1;
};

// The units on demand that a part of a visit needs, each once.
struct NeedRequest {
  std::vector<int> units;
  std::vector<bool> gradients;  // as in VisitRequest, by unit that is needed
};

// The arrangement must have been made with `sums` and be staged, or without `train` for passes without gradients.
class VisitPlanner {
 public:
  // Both outlive the planner.
  VisitPlanner(const Layout& layout, const Arrangement& arrangement);

  // The tasks of one visit, its compute task among them, and those that fetch what is expected to follow.
  Plan visit(const VisitRequest& request);
  // A further part of the visit that was planned last. The needed units come to the device, beside the stage's own, and
  // stay until the next part or the end of the visit. Then what the part added to their gradients leaves the device.
  // The stage's own gradients stay until the visit ends. Every other call that plans ends the visit, and so does
  // drop().
  // An error of kind usage if the stage does not have such units on demand, if one is named twice, or if the
  // arrangement has no room for all. A part may be planned before the part ahead of it is computed: its units are then
  // fetched while that part computes.
  io::Result<Plan> need(const NeedRequest& request);
  // The units on demand that the parts of the visit that was planned last will need. Those of them that are on the
  // device stay there until their part. It counts them as count_use() does.
  void will_need(const std::vector<int>& units);
  // A visit of the stage needs these of its units on demand. Units that are used more stay longer on the device, and
  // those that come next are kept in RAM.
  void count_use(int stage, const std::vector<int>& units) { fetcher_.count_use(stage, units); }
  // Gradients that stayed on the device leave it. For a client that stops in the middle and wants its gradients.
  Plan close();
  // Whether a gradient is on the device.
  bool has_open_gradients() const { return open_.stage != -1; }

  // How many visits' gradients the unit's sum holds. Gradients still on the device count as one. 0 after owe() or
  // drop().
  int gradients_of(int unit) const { return contributions_[unit] + (open_at(unit) != -1 ? 1 : 0); }
  // The unit's gradient is a sum over several visits, so it has low words.
  bool is_sum(int unit) const { return contributions_[unit] > 1; }
  // From now on each of these units owes an update with its gradient; the update runs ahead of the unit's next visit.
  // None of the gradients may still be on the device. Fetches what probably follows.
  Plan owe(const std::vector<int>& units);
  bool owes(int unit) const { return fetcher_.owes(unit); }
  // Forgets a unit's gradient, wherever it is, unless its update is already owed.
  void drop(int unit);
  // Runs the update that a unit owes.
  Plan apply_owed(int unit);
  // The stored words and state of every trainable chunk become a durable generation, while the next plans run. No unit
  // may owe an update.
  Plan commit();
  // Call it when something else wrote the unit's words: the device's copies are then stale.
  void changed(int unit) { fetcher_.invalidate(unit); }
  // How often another visit came than the expected one.
  std::uint64_t departures() const { return departures_; }

 private:
  void observe(int key);
  void prefetch();
  void release_holds();
  void release_expected();
  void open_gradients(const VisitRequest& request, Visit& visit);
  void close_gradients();
  void take_gradient(int unit, std::uint64_t from);
  void compute(const Visit& visit);
  // Position in its stage of a unit whose gradient is on the device; -1: it is not.
  int open_at(int unit) const;

  const Layout& layout_;
  const Arrangement& arrangement_;
  TaskEmitter emitter_;
  Fetcher fetcher_;
  GradientRing gradients_, needed_gradients_;
  Visit current_{.stage = -1};      // the visit that may need units
  int micro_batches_ = 1;           // of it
  std::vector<int> contributions_;  // by unit
  std::vector<int> holds_;          // stages fetched ahead and not visited yet
  std::vector<int> expected_;       // units on demand that wait on the device for their part of the visit
  Visit open_;                      // whose gradients are on the device; stage -1: none
  std::vector<bool> open_units_;    // by unit of its stage
  bool gradients_stay_ = false;     // the client asked to leave them there beyond the visit
  // What came after two visits in a row, the last time; consecutive visits of one stage and pass count as one.
  std::map<std::pair<int, int>, int> next_;
  int before_ = -1, last_ = -1;
  std::uint64_t departures_ = 0;
};

}  // namespace tierflow::swap

#pragma once
// Proves a sequence of Planner's plans (layer-major) before anything is allocated. It uses only what each task says
// that it moves, and nothing that the planner knows:
//  - every buffer, slot and resident extent that a task names exists, and every range lies in the device arena;
//  - two tasks that touch the same bytes, one of them writing, are ordered by dependencies;
//  - dependencies point backwards, so that lanes in plan order cannot deadlock;
//  - played in order, every task finds the bytes it is for: the chunk it names, updated as often as steps have passed,
//    the gradient of the step with every micro-batch in it;
//  - every trainable chunk is updated once a step. A deferred chunk is measured once, and updated ahead of the next
//    forward. A sparse chunk is updated only if the step uses it; before anyone uses it, it has caught up, once, with
//    the updates that it missed;
//  - every item is made once and read once a step, by the computations that the arrangement names. The reader finds
//    what was made;
//  - a commit covers every trainable chunk as the step before left it, and nothing of that is overwritten before the
//    commit;
//  - a speculative step (planner.h) commits the state with which it begins, then updates and measures every trainable
//    chunk once. When it is undone, every chunk is again in its place as it was when the step began.
#include "io/error.h"
#include "swap/planner.h"
#include "swap/update_rules.h"

namespace tierflow::swap {

class PlanChecker {
 public:
  // Both outlive the checker.
  PlanChecker(const Layout& layout, const Arrangement& arrangement);
  PlanChecker(const PlanChecker&) = delete;

  // Each call takes the next plan of the run, as Planner made it with the same arguments. An error names the task and
  // what is wrong with it. It is of kind corruption: a defect of the planner, never the user's fault.
  io::Error train_step(const Plan& plan, bool pending, bool commits = false, Updates updates = Updates::as_arranged,
                       SparseChunks sparse = {});
  io::Error undo(const Plan& plan);
  io::Error flush(const Plan& plan, bool pending = true, SparseChunks sparse = {});
  io::Error evaluate(const Plan& plan);
  // The same as train_step() for a plan that comes in parts: play() takes each part, and finish() the rest.
  void begin_step(bool pending, bool commits, Updates updates = Updates::as_arranged, SparseChunks sparse = {});
  void begin_undo();  // the same for undo()
  void begin_flush(bool pending, SparseChunks sparse = {});
  void begin_evaluation();
  void play(const Plan& part);
  io::Error finish(const Plan& rest);

 private:
  // How often the plan updates each chunk with a deferred gradient, and with the step's own; how often it measures the
  // gradient of a chunk that it defers; how often it makes and reads each item; and how often it commits.
  struct Expected {
    int deferred_updates = 0, updates = 0, measurements = 0, items = 0, commits = 0;
    bool speculates = false;  // no update is deferred
    bool undoes = false;      // the speculative step before
  };

  void begin_plan(const Expected& expected, SparseChunks sparse = {});
  void move(const Task& task);
  void move_item(const Task& task);
  const Item* item_of(const Task& task);
  void compute(const Task& task, const Plan& plan);
  void use_item(const Task& task);
  void sum_gradient(const Task& task, const Visit& visit, std::size_t position, int unit);
  void update(const Task& task);
  void read_weights(std::uint64_t begin, int unit);
  void catch_up(const Task& task);
  void commit();
  void update_on_device(const Task& task);
  void keep_gradient(const Task& task);
  bool has_slot(const Task& task) const;
  // Whether the chunk's next update is the one that the step before deferred.
  bool owes(int chunk) const {
    return arrangement_.deferred[chunk] && sparse_.owes(layout_.chunks()[chunk]) &&
           rules_.updated(chunk) < expected_.deferred_updates;
  }
  bool defers(int chunk) const { return arrangement_.deferred[chunk] && !expected_.speculates; }
  // The gradient that the chunk's next update applies, and the fp32 sum that it was on the device.
  Content gradient_of(int chunk) const;
  Content whole_sum(int chunk, int step) const;

  const Layout& layout_;
  const Arrangement& arrangement_;
  Ledger ledger_;
  UpdateRules rules_;
  Expected expected_;
  std::vector<int> parts_;         // by unit: of how many computations its gradient is the sum
  SparseChunks sparse_;            // of the plan
  std::vector<int> due_;           // by chunk: the updates that it has had, or missed, before the plan's own
  std::vector<int> used_version_;  // by chunk: the version that whoever computes must see
  std::vector<int> made_, read_;   // by item: how often in this plan
  int commits_ = 0;                // in this plan
  int step_ = 0;                   // training steps planned
  int deferred_step_ = 0;          // the step whose gradients this plan's deferred updates apply
};

}  // namespace tierflow::swap

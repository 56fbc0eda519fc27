#pragma once
// Proves a sequence of Planner's plans (layer-major) before anything is allocated, only from what each task says that
// it moves, not from anything that the planner knows:
//  - every buffer, slot and resident extent that a task names exists, and every range lies in the device arena;
//  - two tasks that touch the same bytes, one of them writing, are ordered by dependencies;
//  - dependencies point backwards, so that lanes in plan order cannot deadlock;
//  - played in order, every task finds the bytes it is for: the chunk it names, updated as often as steps have passed,
//    the gradient of the step with every micro-batch in it;
//  - every trainable chunk is updated once a step: deferred ones, which are measured once, ahead of the next forward.
#include <map>
#include <span>
#include <string>
#include <vector>

#include "io/error.h"
#include "swap/arrangement.h"

namespace tierflow::swap {

class PlanChecker {
 public:
  virtual ~PlanChecker() = default;
  // Both outlive the checker.
  PlanChecker(const Layout& layout, const Arrangement& arrangement);

  // The next plan of the run, as Planner made it with the same arguments. What is returned names the task and what is
  // wrong with it; it is a defect of the planner (kind corruption), never of the user.
  io::Error train_step(const Plan& plan, bool pending);
  io::Error flush(const Plan& plan);
  io::Error evaluate(const Plan& plan);

 protected:  // VisitChecker builds on it
  // incoming, low: only in plans of VisitPlanner: a gradient that will be added to a sum, and the sum's low words.
  enum class What : std::uint8_t { nothing, words, state, gradient, sum, saved, incoming, low };
  struct Content {
    What what = What::nothing;
    int of = -1;      // chunk; unit of a sum on the device; stage of what is saved
    int version = 0;  // updates applied to the chunk; of gradients and what is saved the step they belong to
    int parts = 0;    // micro-batches added to a sum; the micro-batch of what is saved
    bool operator==(const Content&) const = default;
  };
  struct Reader {
    TaskId task = 0;
    std::uint64_t begin = 0, end = 0;  // bytes of the device; all of a host buffer
  };
  struct Held {
    Content content;
    TaskId writer = 0;
    bool written = false;
    std::vector<Reader> readers;
  };
  struct Range : Held {
    std::uint64_t end = 0;
  };

  // deferred_due: pending updates of each deferred chunk, one or none.
  void play(const Plan& plan, int deferred_due);
  virtual void move(const Task& task);
  void move_saved(const Task& task);
  int item_of(const Task& task);
  virtual void compute(const Task& task, const Plan& plan);
  void sum_gradient(const Task& task, const Visit& visit, std::size_t position, int unit);
  virtual void update(const Task& task);
  void measure(const Task& task, const Content& content);
  void renew(const Task& task);
  void update_on_device(const Task& task);
  // Of deferred chunks and of the others.
  io::Error expect_each_chunk(int deferred_updates, int updates, int measurements);
  // The step whose gradient this plan's update of the chunk applies.
  int gradient_of(int chunk) const { return arrangement_.deferred[chunk] ? deferred_step_ : step_; }

  void wrong(const std::string& detail);
  void read(Held& held, const Content& expected, const char* where, std::uint64_t begin = 0, std::uint64_t end = 1);
  void write(Held& held, const Content& content, std::uint64_t begin = 0, std::uint64_t end = 1);
  void read_device(std::uint64_t begin, std::uint64_t bytes, const Content& expected);
  void write_device(std::uint64_t begin, std::uint64_t bytes, const Content& content);
  bool in_arena(std::uint64_t begin, std::uint64_t bytes);
  void split(std::uint64_t at);
  virtual Held& host(const HostRef& ref);
  Held& stored(ExtentKind kind, int chunk) { return stored_[static_cast<int>(kind)][chunk]; }
  bool follows(TaskId earlier) const;
  std::span<const TaskId> dependencies_of(TaskId task) const;

  const Layout& layout_;
  const Arrangement& arrangement_;
  std::vector<Held> words_, states_, resident_[3], stored_[3], activation_buffers_, saved_, stored_saved_;
  Held nowhere_;
  std::map<std::uint64_t, Range> device_;
  std::vector<int> version_, due_, updated_, measured_;  // by chunk; the last two in this plan
  // Of every task so far, each one's sorted: those of task i begin at dependencies_begin_[i - first_id_].
  std::vector<TaskId> dependencies_;
  std::vector<std::size_t> dependencies_begin_;
  mutable std::vector<std::uint32_t> seen_;  // by task: the number of the last search that came by
  mutable std::vector<TaskId> open_;
  mutable std::uint32_t search_ = 0;
  TaskId first_id_ = 0, id_ = 0;
  int step_ = 0;                // training steps planned
  int deferred_step_ = 0;       // the step whose gradients this plan's deferred updates apply
  const Task* task_ = nullptr;  // at hand; null at the end of a plan
  std::string problem_;
};

}  // namespace tierflow::swap

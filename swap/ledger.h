#pragma once
// What every byte of a run holds, as far as its tasks say, and whether whoever touches it waits for those that did
// before. Both checkers own a ledger: their rules say what a task must find and what it leaves, the ledger whether that
// can be relied on. Of several things that are wrong the first is kept.
#include <map>
#include <span>
#include <string>
#include <vector>

#include "io/error.h"
#include "swap/arrangement.h"

namespace tierflow::swap {

// incoming: a gradient that will be added to a sum. low: the low words of that sum. sum: an fp32 one on the device.
// item: what of one left the device.
enum class What : std::uint8_t { nothing, words, state, gradient, sum, item, incoming, low };

struct Content {
  What what = What::nothing;
  int of = -1;      // chunk; unit of a sum on the device; item
  int version = 0;  // updates applied to the chunk; of gradients and items the step they belong to
  int parts = 0;    // micro-batches added to a sum; visits added to a gradient
  bool operator==(const Content&) const = default;
};

class Ledger {
 public:
  struct Reader {
    TaskId task = 0;
    std::uint64_t begin = 0, end = 0;  // bytes of the device; all of a host buffer
  };
  // What is known of a buffer, an extent or a range of the device.
  struct Held {
    Content content;
    TaskId writer = 0;
    bool written = false;
    bool exists = false;  // of host memory: the arrangement has it
    std::vector<Reader> readers;
  };

  // Both outlive the ledger. Words and state of every chunk are at home, in version 0.
  Ledger(const Layout& layout, const Arrangement& arrangement);

  // Nothing is wrong with the next plan of the run so far.
  void begin_plan() { problem_.clear(); }
  // Plays it, or its next part: `rule` says of each task what it reads and writes. Stops at the first task with
  // something wrong: dependencies must point backwards, so that lanes in plan order cannot deadlock.
  template <class Rule>
  void play(const Plan& plan, const Rule& rule) {
    id_ = plan.first_id;
    for (const Task& task : plan.tasks) {
      if (!problem_.empty()) break;
      begin(task);
      if (problem_.empty()) rule(task);
      ++id_;
    }
    task_ = nullptr;
  }
  // Something is wrong with the task at hand, or with the end of the plan.
  void wrong(const std::string& detail);
  // What is wrong with the plan: a defect of its planner (kind corruption), never of the user.
  io::Error error() const;

  // Host memory that a task names; what does not exist is wrong.
  Held& host(const HostRef& ref);
  // index: the chunk, or the item of activations.
  Held& stored(ExtentKind kind, int index) { return stored_[static_cast<int>(kind)][index]; }
  // Where a chunk's extent stays between plans: its place in RAM or on the device, or storage.
  Held& home(ExtentKind kind, int chunk);

  // The task at hand reads or writes. What it reads must hold what is expected, by a writer that it waits for; what it
  // writes over must be done with, by everyone that it waits for.
  void read(Held& held, const Content& expected, const char* where);
  void write(Held& held, const Content& content);
  void read_device(std::uint64_t begin, std::uint64_t bytes, const Content& expected);
  void write_device(std::uint64_t begin, std::uint64_t bytes, const Content& content);
  // Of the range that begins there; nothing where none does.
  Content on_device(std::uint64_t begin) const;

 private:
  struct Range : Held {
    std::uint64_t end = 0;
  };

  void begin(const Task& task);
  void read(Held& held, const Content& expected, const char* where, std::uint64_t begin, std::uint64_t end);
  void write(Held& held, const Content& content, std::uint64_t begin, std::uint64_t end);
  bool in_arena(std::uint64_t begin, std::uint64_t bytes);
  void split(std::uint64_t at);
  bool follows(TaskId earlier) const;
  std::span<const TaskId> dependencies_of(TaskId task) const;

  const Arrangement& arrangement_;
  std::vector<Held> host_[kHostPlaces], stored_[kExtentKinds];
  Held nowhere_;
  std::map<std::uint64_t, Range> device_;  // by first byte
  // Of every task so far, each one's sorted: those of task i begin at dependencies_begin_[i - first_id_].
  std::vector<TaskId> dependencies_;
  std::vector<std::size_t> dependencies_begin_;
  mutable std::vector<std::uint32_t> seen_;  // by task: the number of the last search that came by
  mutable std::vector<TaskId> open_;
  mutable std::uint32_t search_ = 0;
  TaskId first_id_ = 0, id_ = 0;
  const Task* task_ = nullptr;  // at hand; null at the end of a plan
  std::string problem_;
};

}  // namespace tierflow::swap

#pragma once
// Records what every byte of a run holds, as its tasks say, and checks that each task waits for those that touched the
// bytes before. Both checkers own a ledger. A checker's rules say what a task must find and what it leaves; the ledger
// says whether the task can rely on it. The first problem is kept.
#include <map>
#include <span>
#include <string>
#include <vector>

#include "io/error.h"
#include "swap/arrangement.h"

namespace tierflow::swap {

// sum: an fp32 gradient sum on the device. incoming: a gradient that will be added to a sum on the host. low: the low
// words of a sum on the host. item: what left the device for an item.
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

  // Begins the next plan of the run, without a problem so far.
  void begin_plan() {
    problem_.clear();
    read_wholes_.clear();
  }
  // Takes the tasks of the plan, or of its next part; for each, `rule` says what it reads and writes. Stops at the
  // first task that is wrong. Dependencies must point backwards, so that lanes in plan order cannot deadlock.
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
  // Records a problem of the current task, or of the end of the plan.
  void wrong(const std::string& detail);
  // The first problem of the plan. It is of kind corruption: a defect of the planner, never the user's fault.
  io::Error error() const;

  // Host memory that a task names. It is a problem if that does not exist.
  Held& host(const HostRef& ref);
  // index: the chunk, or the item of activations.
  Held& stored(ExtentKind kind, int index) { return stored_[static_cast<int>(kind)][index]; }
  // Where a chunk's extent stays between plans: its place in RAM or on the device, or storage.
  Held& home(ExtentKind kind, int chunk);

  // The current task reads or writes. What it reads must hold the expected content, and the task must wait for the
  // writer. If it overwrites something, it must wait for all tasks that used it.
  void read(Held& held, const Content& expected, const char* where);
  void write(Held& held, const Content& content);
  void read_device(std::uint64_t begin, std::uint64_t bytes, const Content& expected);
  void write_device(std::uint64_t begin, std::uint64_t bytes, const Content& content);
  // Whether a task before it, for which it waits directly, has read all of these bytes, in this plan, and nothing has
  // been written there since: then it has the same right to read the same contents. From then on who overwrites
  // something that the earlier task has read, these bytes or others, waits for the current task. If not, the caller
  // reads what it needs of them, piece by piece, and says so with has_read().
  bool reads_again(std::uint64_t begin, std::uint64_t bytes);
  void has_read(std::uint64_t begin, std::uint64_t bytes);
  // The content of the range that begins there; `nothing` if none does.
  Content on_device(std::uint64_t begin) const;

 private:
  struct Range : Held {
    std::uint64_t end = 0;
  };
  // Bytes of the device that tasks read one after the other, and the last of these tasks. A few, the newest last.
  struct ReadWhole {
    std::uint64_t begin = 0, end = 0;
    TaskId last = 0;
  };

  void begin(const Task& task);
  void read(Held& held, const Content& expected, const char* where, std::uint64_t begin, std::uint64_t end);
  void write(Held& held, const Content& content, std::uint64_t begin, std::uint64_t end);
  TaskId last_in_place_of(TaskId reader) const;
  bool in_arena(std::uint64_t begin, std::uint64_t bytes);
  void split(std::uint64_t at);
  void lengthen_chain();
  bool follows(TaskId earlier) const;
  std::span<const TaskId> dependencies_of(TaskId task) const;

  const Arrangement& arrangement_;
  std::vector<Held> host_[kHostPlaces], stored_[kExtentKinds];
  Held nowhere_;
  std::map<std::uint64_t, Range> device_;  // by first byte
  std::vector<ReadWhole> read_wholes_;
  mutable std::vector<TaskId> in_place_of_;  // by task: itself, or who reads again what it has read
  // Of every task so far, each one's sorted: those of task i begin at dependencies_begin_[i - first_id_].
  std::vector<TaskId> dependencies_;
  std::vector<std::size_t> dependencies_begin_;
  // A chain of compute tasks, each of which follows the one before it; they count from 1. By task: the last one that it
  // follows or is, and the first one that follows it or is it. 0: none.
  std::vector<std::uint32_t> after_, before_;
  std::uint32_t chain_length_ = 0;
  mutable std::vector<std::uint32_t> seen_;  // by task: the number of the last search that came by
  mutable std::vector<TaskId> known_by_;     // by task: the last one that was found to wait for it
  mutable std::vector<TaskId> open_;         // of a search: tasks whose dependencies it has not seen
  mutable std::uint32_t search_ = 0;
  TaskId first_id_ = 0, id_ = 0;
  const Task* task_ = nullptr;  // at hand; null at the end of a plan
  std::string problem_;
};

}  // namespace tierflow::swap

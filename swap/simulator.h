#pragma once
// Plays plans on a virtual clock: the executor's lanes, orders and waits, with measured rates in place of the work.
// Nothing is allocated, read or computed. Deterministic.
#include <array>
#include <cstdint>
#include <deque>
#include <initializer_list>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "swap/layout.h"
#include "swap/rates.h"
#include "swap/timeline.h"

namespace tierflow::swap {

struct Rates {
  MachineRates machine;
  // Parameters a second, by GroupShape::precision: on all cores, and on the device.
  std::map<std::string, double> update, device_update;
  std::vector<StageSeconds> stages;
};

class Simulator {
 public:
  // The layout outlives the simulator. `deferred` is the arrangement's: an update at once measures its gradient too.
  Simulator(const Layout& layout, std::vector<bool> deferred, Rates rates);

  // As the executor's: the plan's tasks may start from now() on.
  void append(const Plan& plan);
  // Plays until every update and measurement is done. False, and at an end earlier, where the clock passes `until`.
  bool finish_updates(double until = std::numeric_limits<double>::infinity());
  // Plays until everything is done.
  void drain();
  double now() const { return now_; }
  // Every task leaves a record; but where without_records() was called before the first was appended, those alone that
  // are appended after record().
  void without_records() { records_tasks_ = false; }
  void record() { records_tasks_ = true; }
  std::vector<TaskRecord> take_records();

 private:
  // Who works on a task. A disk serves its queue in order, as does the thread that verifies what was read.
  enum Server { kRead, kWrite, kVerify, kUpload, kDownload, kCompute, kUpdate, kCommit, kServers };
  // Work of one kind: seconds at full speed, and the cores that it takes.
  struct Phase {
    double seconds = 0, cores = 0;
  };
  // At most two; the first is at work. Stored in place, because there are very many of them.
  class Phases {
   public:
    Phases(std::initializer_list<Phase> phases) {
      for (const Phase& phase : phases) push_back(phase);
    }
    void push_back(const Phase& phase) { phases_.at(end_++) = phase; }
    void pop_front() { ++begin_; }
    bool empty() const { return begin_ == end_; }
    Phase& front() { return phases_[begin_]; }
    const Phase& front() const { return phases_[begin_]; }

   private:
    std::array<Phase, 2> phases_;
    std::uint8_t begin_ = 0, end_ = 0;
  };
  struct Work {
    TaskId id = 0;
    Phases phases;
  };
  struct Waiting {
    Work work;
    int dependencies = 0;  // that may not be done, in the queue's list
  };
  // What waits in a lane, in order: lists that are read from their begin, for there are very many tasks.
  struct Queue {
    std::vector<Waiting> tasks;
    std::vector<TaskId> dependencies;  // of one task after the other
    std::size_t next_task = 0, next_dependency = 0;
  };

  bool done(TaskId id) const { return id < base_ || done_[id - base_] != 0; }
  // Null where it leaves none.
  TaskRecord* record_of(TaskId id) {
    return id < first_recorded_ || id - first_recorded_ >= open_records_.size() ? nullptr
                                                                                : &open_records_[id - first_recorded_];
  }
  void forget_finished();
  void start();
  void play(const std::size_t& remaining, double until);
  Phases phases(const Task& task, const Plan& plan) const;
  double compute_seconds(const Task& task, const Plan& plan) const;
  double disk_speed(Server server) const;
  double core_share() const;
  bool may_begin(Queue& queue) const;
  void finish(TaskId id);

  const Layout& layout_;
  const std::vector<bool> deferred_;
  const Rates rates_;
  std::vector<double> update_rates_, device_rates_;  // by chunk
  double now_ = 0;
  TaskId base_ = 0;
  std::vector<std::uint8_t> done_;  // by task from base_ on, of which the first finished_ are
  std::size_t finished_ = 0;
  Queue lanes_[kLanes];
  std::deque<Work> servers_[kServers];
  std::size_t unfinished_ = 0, unfinished_updates_ = 0;
  bool records_tasks_ = true;
  std::vector<TaskRecord> open_records_;  // from first_recorded_ on
  TaskId first_recorded_ = 0;
  std::vector<TaskRecord> records_;  // of what is done
};

}  // namespace tierflow::swap

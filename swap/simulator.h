#pragma once
// Plays plans on a virtual clock: it has the executor's lanes, orders and waits, but takes the time of each task from
// measured rates. Nothing is allocated, read or computed. Deterministic.
#include <cstdint>
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

// The speed of each direction of the drives while the other one works too, as a share of the speed alone.
double both_directions(const MachineRates& machine);
// The least seconds in which the drives read and write these bytes. Reading and writing overlap if that is faster.
double drive_seconds(const MachineRates& machine, double read_bytes, double write_bytes);

class Simulator {
 public:
  // The layout outlives the simulator.
  Simulator(const Layout& layout, Rates rates);

  // Begins anew, as if it had just been made with the same rates. It keeps its memory, because a step has very many
  // tasks.
  void restart();
  // As Executor::append(): the plan's tasks may start from now() on.
  void append(const Plan& plan);
  // Plays until every update and measurement is done. Stops earlier and returns false if the clock passes `until`.
  bool finish_updates(double until = std::numeric_limits<double>::infinity());
  // Plays until everything is done.
  void drain();
  double now() const { return now_; }
  // Seconds until now() in which something was computed.
  double computing() const { return computing_; }
  // By default every task leaves a record. After without_records(), called before the first append(), only tasks that
  // are appended after record() do.
  void without_records() { records_tasks_ = false; }
  void record() { records_tasks_ = true; }
  std::vector<TaskRecord> take_records();

 private:
  // Who works on tasks: each on those of its lane, in order, one at a time. What was read is verified by another one,
  // and what came from the device is stamped by another one.
  enum Server { kRead, kWrite, kVerify, kUpload, kDownload, kStamp, kCompute, kUpdate, kCommit, kServers };
  static constexpr bool is_second(Server server) { return server == kVerify || server == kStamp; }
  static constexpr Server first_of(Server second) { return second == kVerify ? kRead : kDownload; }
  // kServers: nobody ends what it began.
  static constexpr Server second_of(Server server) {
    return server == kRead ? kVerify : server == kDownload ? kStamp : kServers;
  }
  // `seconds` of work at full speed on `cores` cores, then `then` seconds on one core (negative: none). moved: the
  // bytes that the first part reads and writes in host memory.
  struct Work {
    double seconds = 0, cores = 0, then = -1, moved = 0;
  };
  struct Waiting {
    TaskId id = 0;
    Work work;
    int dependencies = 0;  // that may not be done, in the queue's list
  };
  // A lane's tasks that are not done, in order: lists that are read from their begin, for there are very many tasks.
  struct Queue {
    std::vector<Waiting> tasks;
    std::vector<TaskId> dependencies;  // of one task after the other
    std::size_t begun = 0, next_dependency = 0;
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
  Work work_of(const Task& task, const Plan& plan) const;
  double compute_seconds(const Task& task, const Plan& plan) const;
  bool may_begin(Queue& queue) const;
  bool idle(Server server) const { return left_[server] == kIdle; }
  void take_next(Server server);
  void work_on(Server server, double seconds, double cores, double moved = 0);
  void end_work(Server server);
  void finish(TaskId id);

  static constexpr double kIdle = std::numeric_limits<double>::infinity();

  const Layout& layout_;
  const Rates rates_;
  std::vector<double> update_rates_, device_rates_;  // by chunk
  double both_disks_ = 1;                            // a disk's speed while the other one works too
  double now_ = 0, computing_ = 0;
  TaskId base_ = 0;
  std::vector<std::uint8_t> done_;  // by task from base_ on, of which the first finished_ are
  std::size_t finished_ = 0;
  Queue lanes_[kLanes];
  // By server: its next task in its lane's queue; where it is at work on that one, whether on what follows, the seconds
  // at full speed that are left of it, and the cores that it takes.
  std::size_t next_[kServers] = {};
  bool follows_[kServers] = {};
  double left_[kServers] = {}, cores_[kServers] = {};
  double memory_[kServers] = {};  // bytes a second of host memory that it moves at full speed
  std::size_t unfinished_ = 0, unfinished_updates_ = 0;
  bool records_tasks_ = true;
  std::vector<TaskRecord> open_records_;  // from first_recorded_ on
  TaskId first_recorded_ = 0;
  std::vector<TaskRecord> records_;  // of what is done
};

}  // namespace tierflow::swap

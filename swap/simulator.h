#pragma once
// Plays plans on a virtual clock: the executor's lanes, orders and waits, with measured rates in place of the work.
// Nothing is allocated, read or computed. Deterministic.
#include <cstdint>
#include <deque>
#include <vector>

#include "swap/timeline.h"

namespace tierflow::swap {

// What the machine does when it does nothing else.
struct MachineRates {
  double disk_read = 0, disk_write = 0;  // bytes a second, of all drives together; half duplex
  double upload = 0, download = 0;       // bytes a second; of a gradient, the fp32 bytes on the device
  double update = 0, measure = 0;        // parameters a second, on all cores
  double checksum = 0;                   // bytes a second, on one core
  int cores = 1;
  bool compute_on_cores = true;  // the device is the CPU: computing and copying take cores from the update
};

// Seconds of one micro-batch in a stage; head: forward and backward of the last one.
struct StageSeconds {
  double forward = 0, backward = 0, head = 0, evaluate = 0;
};

struct Rates {
  MachineRates machine;
  std::vector<StageSeconds> stages;
};

class Simulator {
 public:
  explicit Simulator(Rates rates);

  // As the executor's: the plan's tasks may start from now() on.
  void append(const Plan& plan);
  // Plays until every update and measurement, or everything, is done.
  void finish_updates();
  void drain();
  double now() const { return now_; }
  std::vector<TaskRecord> take_records();

 private:
  // Who works on a task. A disk serves its queue in order, as does the thread that verifies what was read.
  enum Server { kRead, kWrite, kVerify, kUpload, kDownload, kCompute, kUpdate, kServers };
  struct Node {
    TaskRecord record;
    int waiting = 0;
    bool done = false, updates = false;
    std::vector<TaskId> dependents;
  };
  struct Work {
    TaskId id = 0;
    double left = 0;  // seconds at full speed
  };

  Node& node(TaskId id) { return nodes_[id - base_]; }
  void start();
  void play(const std::size_t& remaining);
  double seconds(Server server, const TaskRecord& task) const;
  double cores_wanted(Server server) const;
  double speed(Server server) const;
  void finish(TaskId id);

  const Rates rates_;
  double now_ = 0;
  std::deque<Node> nodes_;
  TaskId base_ = 0;
  std::deque<TaskId> lanes_[kLanes];
  std::deque<Work> servers_[kServers];
  std::size_t unfinished_ = 0, unfinished_updates_ = 0;
  std::vector<TaskRecord> records_;
};

}  // namespace tierflow::swap

#pragma once
// Plays plans on a virtual clock: the executor's lanes, orders and waits, with measured rates in place of the work.
// Nothing is allocated, read or computed. Deterministic.
#include <array>
#include <cstdint>
#include <deque>
#include <initializer_list>
#include <map>
#include <string>
#include <vector>

#include "swap/layout.h"
#include "swap/timeline.h"

namespace tierflow::swap {

// How fast the machine does each kind of work while it does nothing else. Work with a rate of 0 takes no time.
struct MachineRates {
  double disk_read = 0, disk_write = 0;  // bytes a second, of all drives together
  double disk_mixed = 0;                 // of both directions together, as many bytes each; 0: half duplex
  double upload = 0, download = 0;       // bytes a second
  double cast = 0;                       // parameters a second: fp32 gradients on the device to bf16 on the host
  double fill = 0;                       // bytes a second: zeroing a gradient on the device
  double measure = 0;                    // parameters a second, on all cores
  double checksum = 0;                   // bytes a second, on one core
  int cores = 1;                         // of the machine
  int threads = 1;                       // that compute with, and that update
  bool compute_on_cores = true;          // the device is the CPU: computing and copying take cores from the update
};

// Seconds of one micro-batch in a stage; head: forward and backward of the last one.
struct StageSeconds {
  double forward = 0, backward = 0, head = 0, evaluate = 0;
  // Where the activations are kept; where they are swapped, with the copies into and out of the slot.
  double forward_keeping = 0, backward_kept = 0, forward_swapping = 0, backward_swapped = 0;

  StageSeconds& operator*=(double factor) {
    for (double* seconds : {&forward, &backward, &head, &evaluate, &forward_keeping, &backward_kept, &forward_swapping,
                            &backward_swapped})
      *seconds *= factor;
    return *this;
  }
};

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
  void append(Plan plan);
  // Plays until every update and measurement, or everything, is done.
  void finish_updates();
  void drain();
  double now() const { return now_; }
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
  static constexpr int kNone = -1;
  // What finishing another task looks at; small, because it looks at many of them in no order.
  struct Node {
    int waiting = 0;
    int dependents = kNone;  // the first of them, in dependents_
    bool done = false, updates = false;
  };
  struct Detail {
    TaskRecord record;
    Phases phases{};
  };
  struct Dependent {
    TaskId id = 0;
    int next = kNone;
  };
  struct Work {
    TaskId id = 0;
    Phases phases;
  };

  Node& node(TaskId id) { return nodes_[id - base_]; }
  Detail& detail(TaskId id) { return details_[id - base_]; }
  void start();
  void play(const std::size_t& remaining);
  Phases phases(const Task& task, const Plan& plan) const;
  double compute_seconds(const Task& task, const Plan& plan) const;
  double speed(Server server) const;
  void add_dependent(Node& node, TaskId id);
  void finish(TaskId id);

  const Layout& layout_;
  const std::vector<bool> deferred_;
  const Rates rates_;
  std::vector<double> update_rates_, device_rates_;  // by chunk
  double now_ = 0;
  std::deque<Node> nodes_;
  std::deque<Detail> details_;
  std::vector<Dependent> dependents_;  // of all nodes, lists in one place: there are very many of them
  int free_dependents_ = kNone;
  TaskId base_ = 0;
  std::deque<TaskId> lanes_[kLanes];
  std::deque<Work> servers_[kServers];
  std::size_t unfinished_ = 0, unfinished_updates_ = 0;
  std::vector<TaskRecord> records_;
};

}  // namespace tierflow::swap

#pragma once
// Proves VisitPlanner's plans as they come, by the rules of PlanChecker. Whatever the client's order: a visit computes
// with weights after every owed update; every gradient that a visit adds leaves the device once and is in the sum that
// its update applies; an update runs once.
#include <optional>
#include <vector>

#include "swap/check.h"
#include "swap/visit_planner.h"

namespace tierflow::swap {

class VisitChecker : private PlanChecker {
 public:
  // Both outlive the checker.
  VisitChecker(const Layout& layout, const Arrangement& arrangement);

  // As the planner's, with what it gave; calls in the same order. Errors as PlanChecker's.
  io::Error visit(const Plan& plan, const VisitRequest& request);
  io::Error close(const Plan& plan);
  io::Error owe(const Plan& plan, const std::vector<int>& units);
  io::Error settle(const Plan& plan, int unit);
  void drop(int unit);
  void changed(int unit);

 private:
  struct Owed {
    int epoch = 0, visits = 0;
  };
  // What is known of a unit's gradient.
  struct Sum {
    int epoch = 0;   // how many sums were owed or dropped before
    int visits = 0;  // that added to it; visits for several micro-batches in a row count as one
    int serial = 0;  // of the fp32 sum on the device
    int parts = 0;   // micro-batches in that; 0: it has left
    std::optional<Owed> owed;
  };

  void move(const Task& task) override;
  void compute(const Task& task, const Plan& plan) override;
  void update(const Task& task) override;
  Held& host(const HostRef& ref) override;
  void take_gradient(const Task& task);
  void accumulate(const Task& task);
  void copy(Held& from, Held& to, const char* where, What what, int chunk);
  // Plays the plan. After it, only gradients of the stage that is kept open may still be on the device.
  io::Error finish(const Plan& plan, const VisitRequest* request);
  void expect_at_home(int unit);
  Held& home(ExtentKind kind, int chunk);

  std::vector<Sum> sums_;  // by unit
  std::vector<int> taken_,
      taken_serial_;                      // by chunk: visits' gradients that left the device, and the last one's serial
  std::vector<int> due_version_;          // by chunk: updates that whoever computes must see
  std::vector<Held> lows_, stored_lows_;  // by chunk
  const VisitRequest* request_ = nullptr;  // of the plan at hand
  int computed_ = 0;
  int open_stage_ = -1;
};

}  // namespace tierflow::swap

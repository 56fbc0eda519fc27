#pragma once
// Proves VisitPlanner's plans as they come, from what each task says that it moves. In whatever order the client
// visits: a visit computes with weights after every owed update; every gradient that a visit adds leaves the device
// once, and is in the sum that its update applies; an update runs once.
#include <optional>
#include <vector>

#include "swap/update_rules.h"
#include "swap/visit_planner.h"

namespace tierflow::swap {

class VisitChecker {
 public:
  // Both outlive the checker.
  VisitChecker(const Layout& layout, const Arrangement& arrangement);
  VisitChecker(const VisitChecker&) = delete;

  // Takes the plans that the planner's functions of the same names gave, in the same order. Errors are those of
  // PlanChecker.
  io::Error visit(const Plan& plan, const VisitRequest& request);
  io::Error need(const Plan& plan, const NeedRequest& request);
  io::Error close(const Plan& plan);
  io::Error owe(const Plan& plan, const std::vector<int>& units);
  io::Error apply_owed(const Plan& plan, int unit);
  io::Error commit(const Plan& plan);
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

  void move(const Task& task);
  void compute(const Task& task, const Plan& plan);
  void commit();
  void update(const Task& task);
  void take_gradient(const Task& task);
  void accumulate(const Task& task);
  void copy(Ledger::Held& from, Ledger::Held& to, const char* where, What what, int chunk);
  // Checks the plan. After it, only gradients of the open stage may still be on the device.
  io::Error finish(const Plan& plan, const VisitRequest* request);
  void expect_at_home(int unit);

  const Layout& layout_;
  Ledger ledger_;
  UpdateRules rules_;
  const bool keeps_sums_;  // else nothing is trained, and a plan leaves no gradients that could be looked for
  std::vector<Sum> sums_;  // by unit
  std::vector<int> taken_,
      taken_serial_;               // by chunk: visits' gradients that left the device, and the last one's serial
  std::vector<int> used_version_;  // by chunk: updates that whoever computes must see
  VisitRequest visit_;             // the last one
  const VisitRequest* request_ = nullptr;  // of the plan at hand
  const NeedRequest* need_ = nullptr;      // of a part of that visit
  bool gradients_stayed_ = false;          // the visit before was to leave its gradients on the device
  int computed_ = 0, commits_ = 0;         // in the plan at hand
  int open_stage_ = -1;
};

}  // namespace tierflow::swap

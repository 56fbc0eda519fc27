#pragma once
// The rules that layer-major plans and single visits share. Words and state of a chunk have a version, which counts its
// updates, wherever they are. An update finds both in one version and leaves them in the next.
#include <vector>

#include "swap/ledger.h"

namespace tierflow::swap {

class UpdateRules {
 public:
  // All outlive the rules.
  UpdateRules(const Layout& layout, const Arrangement& arrangement, Ledger& ledger);

  // Begins the next plan: updated() and measured() count from zero.
  void begin_plan();
  // The updates of a chunk so far, and its updates and measurements in this plan.
  int version(int chunk) const { return version_[chunk]; }
  int updated(int chunk) const { return updated_[chunk]; }
  int measured(int chunk) const { return measured_[chunk]; }
  // Something else wrote the chunk.
  void changed(int chunk);
  // The chunk in storage is in the version before again. Copies elsewhere are of a later version.
  void go_back(int chunk);

  // Words and state of every trainable chunk are in storage, in these versions.
  void commit(const std::vector<int>& versions);

  bool names_chunk(const Task& task);
  // Moves words or state. False: the task is of another kind.
  bool move(const Task& task);
  void measure(const Task& task, const Content& gradient);
  // The same for a gradient that stays on the device; the caller reads the sum that it is rounded from.
  void keep_gradient(const Task& task, const Content& gradient);
  // Words and state of an update; the caller reads the gradient.
  void update(const Task& task);
  void update_on_device(const Task& task);
  // Words and state of a chunk that catches up with version `to`.
  void catch_up(const Task& task, int to);

 private:
  void change(const Task& task, int to);

  const Layout& layout_;
  const Arrangement& arrangement_;
  Ledger& ledger_;
  std::vector<int> version_, updated_, measured_;
  std::vector<int> seen_;  // those that the plan at hand updates or measures
};

}  // namespace tierflow::swap

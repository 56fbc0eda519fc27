#pragma once
// Inside of Streamer, shared by streamer*.cpp.
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/base/exception.h"
#include "runtime/planning/left_store.h"
#include "runtime/state/streamed_state.h"
#include "runtime/stream/durable_store.h"
#include "runtime/stream/streamer.h"
#include "runtime/stream/streamer_plan.h"
#include "swap/visit_planner.h"

namespace tierflow {

// Where a turn's gradient of one tensor adds up, on the device.
struct Sum {
  int unit = 0, tensor = 0;
  torch::Tensor values;  // fp32; undefined where the turn takes no gradient
  bool fresh = true;     // holds nothing yet

  void add(const torch::Tensor& gradient) {
    fresh ? values.copy_(gradient) : values.add_(gradient);
    fresh = false;
  }
};

struct Streamer::Impl {
  Impl(std::vector<UnitSpec> units_, const std::vector<std::vector<int>>& stages, StreamerOptions options_,
       const Progress& progress, const Say& say)
      : units(std::move(units_)),
        left(options_.durable ? find_durable(units, options_, progress, say) : std::nullopt),
        options(std::move(options_)),
        torch_device(options.device == "cuda" ? torch::kCUDA : torch::kCPU),
        plan(make_plan(stages, progress, say)) {}

  ~Impl() {
    state.reset();
    if (!options.durable || store == nullptr || stays) return;
    store->remove_files();  // first: without it, what lies beside it is nothing
    remove_note(options.storage);
  }

  // If the budgets need other chunks than the resumed state has, the state is cut anew, and has them afterwards.
  StreamerPlan make_plan(const std::vector<std::vector<int>>& stages, const Progress& progress, const Say& say);
  void set_up(const WeightSource& weights, const StoredSource& stored, const Progress& progress, const Say& say);
  void make_store();
  // Everything planned is done, nothing runs: extents may be accessed.
  void quiet() {
    if (turn.visit != nullptr)
      fail_usage(
          "a streamed parameter or gradient was read or written while another module runs: do it before or "
          "after forward() and backward()");
    throw_if(executor().drain());
  }
  void check_turn(int stage, swap::Pass pass, const std::vector<bool>& gradients) const;  // throws Exception (usage)
  void open_sums();
  void add(std::size_t weight, const torch::Tensor& gradient) {
    Sum& sum = sums.at(weight);
    if (!sum.values.defined()) return;
    sum.add(gradient);
    touched[sum.unit][sum.tensor] = true;
  }
  // What a broken-off step left on the device joins its sum.
  void close_gradients() {
    if (planner->has_open_gradients()) executor().append(planner->close(), work);
  }
  void finish_update(int unit) {
    if (planner->owes(unit)) executor().append(planner->apply_owed(unit), work);
  }
  const std::vector<std::int64_t>& shape(int unit, int tensor) const { return units[unit].tensors[tensor].shape; }
  void between_steps(const char* what) const;
  void expect_durable() const;
  void check_updates() const {
    if (work->asked() != work->updated())
      throw Exception(io::ErrorKind::numeric, "updates reached " + std::to_string(work->updated()) + " of " +
                                                  std::to_string(work->asked()) + " parameters");
  }

  const std::vector<UnitSpec> units;
  std::optional<swap::Store::Contents> left;  // the state that is resumed
  const StreamerOptions options;
  const torch::Device torch_device;
  StreamerPlan plan;  // packing, layout, arrangement
  swap::Executor& executor() const { return state->executor(); }
  std::unique_ptr<swap::Store> store;
  bool stays = false;                    // the store, when this ends
  std::uint64_t planned_generation = 0;  // of the commit that was begun last
  std::optional<StreamerCommit> resumed;
  std::unique_ptr<swap::VisitPlanner> planner;
  std::shared_ptr<StreamWork> work;
  std::unique_ptr<StreamedState> state;    // last: drains before the rest goes
  swap::Entered turn;                      // visit: null outside of turns
  std::vector<Sum> sums;                   // of the turn, a weight each
  std::vector<std::vector<bool>> touched;  // by unit and tensor
};

}  // namespace tierflow

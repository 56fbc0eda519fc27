#include "swap/visit_planner.h"

#include <algorithm>
#include <utility>

namespace tierflow::swap {
namespace {

constexpr int kStep = -2;  // observed between the last visit of a step and the first of the next

int key_of(int stage, Pass pass) {
  return stage * 4 + static_cast<int>(pass);
}

}  // namespace

VisitPlanner::VisitPlanner(const Layout& layout, const Arrangement& arrangement)
    : layout_(layout),
      emitter_(layout, arrangement),
      fetcher_(layout, arrangement, emitter_),
      gradients_(arrangement.weight_ring, arrangement.gradient_ring),
      contributions_(layout.units().size(), 0) {
  open_.stage = -1;
}

Plan VisitPlanner::visit(const VisitRequest& request) {
  observe(key_of(request.stage, request.pass));
  const bool adds = request.pass == Pass::backward || request.pass == Pass::head;
  if (open_.stage != -1 && (open_.stage != request.stage || !adds)) close_gradients();
  Visit visit{.stage = request.stage, .pass = request.pass};
  fetcher_.fetch(visit, /*forced=*/true);
  if (adds) open_gradients(request, visit);
  emitter_.compute(visit, 0, 0);
  const bool was_held = std::erase(holds_, request.stage) != 0;
  if (open_.stage != -1 && !request.keep) close_gradients();
  prefetch();  // must not evict this stage's weights: it may be visited again
  fetcher_.release(request.stage, was_held ? 2 : 1);
  return emitter_.take({std::move(visit)});
}

Plan VisitPlanner::close() {
  if (open_.stage != -1) close_gradients();
  return emitter_.take();
}

void VisitPlanner::observe(int key) {
  if (key == last_) return;
  const auto expected = next_.find({before_, last_});
  if (expected != next_.end() && expected->second != key) {
    if (expected->second != kStep && key != kStep) ++departures_;
    release_holds();
  }
  next_[{before_, last_}] = key;
  before_ = last_;
  last_ = key;
}

void VisitPlanner::release_holds() {
  for (const int stage : holds_) fetcher_.release(stage);
  holds_.clear();
}

void VisitPlanner::prefetch() {
  int before = before_, last = last_;
  for (int ahead = 0; ahead < kLookahead; ++ahead) {
    const auto found = next_.find({before, last});
    if (found == next_.end() || found->second == kStep) return;
    before = last;
    last = found->second;
    const int stage = last / 4;
    if (std::find(holds_.begin(), holds_.end(), stage) != holds_.end()) continue;
    Visit next{.stage = stage, .pass = static_cast<Pass>(last % 4)};
    if (!fetcher_.fetch(next, /*forced=*/false)) return;
    holds_.push_back(stage);
  }
}

void VisitPlanner::open_gradients(const VisitRequest& request, Visit& visit) {
  const StageShape& stage = layout_.stages()[request.stage];
  if (open_.stage == request.stage && open_units_ != request.gradients) close_gradients();
  if (open_.stage == request.stage) {
    visit.gradients = open_.gradients;
    return;
  }
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < stage.units.size(); ++i)
    if (request.gradients[i]) bytes += layout_.gradient_bytes(stage.units[i]);
  if (bytes == 0) return;
  std::uint64_t place = gradients_.allocate(bytes);
  for (std::size_t i = 0; i < stage.units.size(); ++i) {
    if (!request.gradients[i]) continue;
    visit.gradients[i] = place;
    visit.fresh_gradient[i] = true;
    place += layout_.gradient_bytes(stage.units[i]);
  }
  open_ = visit;
  open_units_ = request.gradients;
}

void VisitPlanner::close_gradients() {
  const StageShape& stage = layout_.stages()[open_.stage];
  emitter_.serve(Pass::backward, open_.stage);
  for (std::size_t i = 0; i < stage.units.size(); ++i) {
    if (open_.gradients[i] == kNowhere) continue;
    const int unit = stage.units[i];
    for (const Chunk& chunk : layout_.trainable_chunks_of(unit)) {
      const std::uint64_t from = open_.gradients[i] + 4 * chunk.first;
      if (contributions_[unit] == 0)
        emitter_.stage_gradient(chunk.id, from);
      else
        emitter_.accumulate(chunk.id, from, /*first_sum=*/contributions_[unit] == 1);
    }
    ++contributions_[unit];
  }
  open_.stage = -1;
}

int VisitPlanner::kept_at(int unit) const {
  if (open_.stage == -1) return -1;
  const std::vector<int>& units = layout_.stages()[open_.stage].units;
  for (std::size_t i = 0; i < units.size(); ++i)
    if (units[i] == unit && open_.gradients[i] != kNowhere) return static_cast<int>(i);
  return -1;
}

void VisitPlanner::drop(int unit) {
  contributions_[unit] = 0;
  const int position = kept_at(unit);
  if (position == -1) return;
  // The stage's next visit wants other gradients than those that are left: it starts all of them afresh.
  open_.gradients[position] = kNowhere;
  open_units_[position] = false;
  if (std::find(open_units_.begin(), open_units_.end(), true) == open_units_.end()) open_.stage = -1;
}

Plan VisitPlanner::owe(const std::vector<int>& units) {
  for (const int unit : units) fetcher_.owe(unit, contributions_[unit] > 1 ? Owed::sum : Owed::gradient);
  for (const int unit : units) contributions_[unit] = 0;
  observe(kStep);
  release_holds();  // what was fetched before is stale
  prefetch();
  return emitter_.take();
}

Plan VisitPlanner::settle(int unit) {
  emitter_.serve(Pass::forward);
  if (owes(unit)) fetcher_.settle(unit);
  return emitter_.take();
}

}  // namespace tierflow::swap

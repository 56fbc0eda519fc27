#include "swap/visit_planner.h"

#include <algorithm>
#include <string>
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
      arrangement_(arrangement),
      emitter_(layout, arrangement),
      fetcher_(layout, arrangement, emitter_),
      gradients_(arrangement.weight_ring, arrangement.gradient_ring),
      needed_gradients_(arrangement.needed_begin() + arrangement.needed_ring, arrangement.needed_gradients),
      contributions_(layout.units().size(), 0) {
  open_.stage = -1;
}

Plan VisitPlanner::visit(const VisitRequest& request) {
  observe(key_of(request.stage, request.pass));
  release_expected();
  const bool adds = request.pass == Pass::backward || request.pass == Pass::head;
  if (open_.stage != -1 && (!gradients_stay_ || open_.stage != request.stage || !adds)) close_gradients();
  Visit visit{.stage = request.stage, .pass = request.pass};
  fetcher_.fetch(visit, /*forced=*/true);
  if (adds) open_gradients(request, visit);
  micro_batches_ = request.micro_batches;
  compute(visit);
  const bool was_held = std::erase(holds_, request.stage) != 0;
  const StageShape& stage = layout_.stages()[request.stage];
  gradients_stay_ = request.gradients_stay;
  if (open_.stage != -1 && !gradients_stay_ && stage.on_demand.empty()) close_gradients();
  prefetch();  // must not evict this stage's weights: it may be visited again
  fetcher_.release(stage.units, was_held ? 2 : 1);
  current_ = std::move(visit);
  current_.fresh_gradient.assign(stage.units.size(), false);
  return emitter_.take();
}

io::Result<Plan> VisitPlanner::need(const NeedRequest& request) {
  const auto usage = [](std::string detail) {
    return io::Error{.kind = io::ErrorKind::usage, .operation = "need", .detail = std::move(detail)};
  };
  if (current_.stage == -1) return usage("there is no visit that could need units");
  const std::vector<int>& on_demand = layout_.stages()[current_.stage].on_demand;
  for (const int unit : request.units) {
    if (std::ranges::find(on_demand, unit) == on_demand.end())
      return usage("stage " + std::to_string(current_.stage) + " does not have unit " + std::to_string(unit) +
                   " on demand");
    if (std::ranges::count(request.units, unit) > 1) return usage("unit " + std::to_string(unit) + " is named twice");
  }
  const std::uint64_t bytes = fetcher_.bytes_of(request.units);
  if (bytes > arrangement_.needed_ring)
    return usage("these units take " + std::to_string(bytes) + " bytes of the device; the arrangement has " +
                 std::to_string(arrangement_.needed_ring) + " for units on demand");
  Visit part = current_;
  part.needed = request.units;
  fetcher_.fetch(part, /*forced=*/true);
  const std::size_t first = part.weights.size() - request.units.size();
  const bool adds = part.pass == Pass::backward || part.pass == Pass::head;
  std::uint64_t gradients = 0;
  for (std::size_t i = 0; i < request.units.size(); ++i)
    if (adds && request.gradients[i]) gradients += layout_.gradient_bytes(request.units[i]);
  std::uint64_t place = gradients == 0 ? 0 : needed_gradients_.allocate(gradients);
  for (std::size_t i = 0; i < request.units.size(); ++i) {
    if (!adds || !request.gradients[i]) continue;
    part.gradients[first + i] = place;
    part.fresh_gradient[first + i] = true;
    place += layout_.gradient_bytes(request.units[i]);
  }
  compute(part);
  fetcher_.release(request.units);
  for (const int unit : request.units)
    if (std::erase(expected_, unit) != 0) fetcher_.release({unit});
  for (std::size_t i = 0; i < request.units.size(); ++i)
    if (part.gradients[first + i] != kNowhere) take_gradient(request.units[i], part.gradients[first + i]);
  return emitter_.take();
}

void VisitPlanner::will_need(const std::vector<int>& units) {
  count_use(current_.stage, units);
  fetcher_.hold(units);
  release_expected();
  expected_ = units;
}

void VisitPlanner::release_expected() {
  fetcher_.release(expected_);
  expected_.clear();
}

void VisitPlanner::compute(const Visit& visit) {
  for (int micro_batch = 0; micro_batch < micro_batches_; ++micro_batch) emitter_.compute(visit, micro_batch);
}

Plan VisitPlanner::close() {
  current_.stage = -1;
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
  for (const int stage : holds_) fetcher_.release(layout_.stages()[stage].units);
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
  for (std::size_t i = 0; i < stage.units.size(); ++i)
    if (open_.gradients[i] != kNowhere) take_gradient(stage.units[i], open_.gradients[i]);
  open_.stage = -1;
}

void VisitPlanner::take_gradient(int unit, std::uint64_t from) {
  for (const Chunk& chunk : layout_.trainable_chunks_of(unit)) {
    if (contributions_[unit] == 0)
      emitter_.take_gradient(chunk.id, from + 4 * chunk.first);
    else
      emitter_.accumulate(chunk.id, from + 4 * chunk.first, /*first_sum=*/contributions_[unit] == 1);
  }
  ++contributions_[unit];
}

int VisitPlanner::open_at(int unit) const {
  if (open_.stage == -1) return -1;
  const std::vector<int>& units = layout_.stages()[open_.stage].units;
  for (std::size_t i = 0; i < units.size(); ++i)
    if (units[i] == unit && open_.gradients[i] != kNowhere) return static_cast<int>(i);
  return -1;
}

void VisitPlanner::drop(int unit) {
  current_.stage = -1;
  contributions_[unit] = 0;
  const int position = open_at(unit);
  if (position == -1) return;
  // The stage's next visit wants other gradients than those that are left: it starts all of them afresh.
  open_.gradients[position] = kNowhere;
  open_units_[position] = false;
  if (std::find(open_units_.begin(), open_units_.end(), true) == open_units_.end()) open_.stage = -1;
}

Plan VisitPlanner::owe(const std::vector<int>& units) {
  current_.stage = -1;
  for (const int unit : units) fetcher_.owe(unit, contributions_[unit] > 1 ? Owed::sum : Owed::gradient);
  for (const int unit : units) contributions_[unit] = 0;
  observe(kStep);
  release_holds();  // what was fetched before is stale
  prefetch();
  return emitter_.take();
}

Plan VisitPlanner::commit() {
  current_.stage = -1;
  emitter_.commit();
  return emitter_.take();
}

Plan VisitPlanner::apply_owed(int unit) {
  current_.stage = -1;
  emitter_.serve(Pass::forward);
  fetcher_.apply_owed(unit);
  return emitter_.take();
}

}  // namespace tierflow::swap

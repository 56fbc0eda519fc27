#include "swap/visit_planner.h"

#include <algorithm>

#include "swap/access.h"

namespace tierflow::swap {
namespace {

constexpr int kStep = -2;  // observed between the last visit of a step and the first of the next

int key_of(int stage, Pass pass) {
  return stage * 4 + static_cast<int>(pass);
}

}  // namespace

VisitPlanner::VisitPlanner(const Layout& layout, const Arrangement& arrangement) : Planner(layout, arrangement) {
  pending_ = true;
  updated_.assign(layout.units().size(), true);
  contributions_.assign(layout.units().size(), 0);
  owed_sum_.assign(layout.units().size(), false);
  open_.stage = -1;
}

Plan VisitPlanner::visit(const VisitRequest& request) {
  plan_ = {.first_id = next_id_};
  observe(key_of(request.stage, request.pass));
  const bool adds = request.pass == Pass::backward || request.pass == Pass::head;
  if (open_.stage != -1 && (open_.stage != request.stage || !adds)) close_gradients();
  plan_.visits.push_back({.stage = request.stage, .pass = request.pass});
  fetch(0, /*forced=*/true);
  Visit& visit = plan_.visits.front();
  const StageShape& stage = layout_.stages()[request.stage];
  pass_ = request.pass;
  stage_ = request.stage;
  std::vector<Access> accesses;
  for (std::size_t i = 0; i < stage.units.size(); ++i)
    accesses.push_back(device_access(visit.weights[i], 2 * layout_.unit_elements(stage.units[i]), false));
  if (adds) open_gradients(request, visit);
  for (std::size_t i = 0; i < stage.units.size(); ++i)
    if (visit.gradients[i] != kNowhere)
      accesses.push_back(device_access(visit.gradients[i], layout_.gradient_bytes(stage.units[i]), true));
  Task& task = emit(TaskKind::compute, Lane::compute, std::move(accesses));
  task.visit = 0;
  task.micro_batch = 0;
  task.device_offset = kNowhere;
  const auto held = std::find(holds_.begin(), holds_.end(), request.stage);
  const int claims = held == holds_.end() ? 1 : 2;
  if (held != holds_.end()) holds_.erase(held);
  if (open_.stage != -1 && !request.keep) close_gradients();
  prefetch();  // must not evict this stage's weights: it may be visited again
  for (int unit : stage.units)
    if (Region* region = find_region(unit)) region->busy = std::max(0, region->busy - claims);
  return std::move(plan_);
}

Plan VisitPlanner::close() {
  plan_ = {.first_id = next_id_};
  if (open_.stage != -1) close_gradients();
  return std::move(plan_);
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
  for (int stage : holds_)
    for (int unit : layout_.stages()[stage].units)
      if (Region* region = find_region(unit); region != nullptr && region->busy > 0) --region->busy;
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
    plan_.visits.push_back({.stage = stage, .pass = static_cast<Pass>(last % 4)});
    const bool fetched = fetch(static_cast<int>(plan_.visits.size()) - 1, /*forced=*/false);
    plan_.visits.pop_back();
    if (!fetched) return;
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
  if (gradient_position_ + bytes > arrangement_.gradient_ring) gradient_position_ = 0;
  for (std::size_t i = 0; i < stage.units.size(); ++i) {
    if (!request.gradients[i]) continue;
    visit.gradients[i] = arrangement_.weight_ring + gradient_position_;
    visit.fresh_gradient[i] = true;
    gradient_position_ += layout_.gradient_bytes(stage.units[i]);
  }
  open_ = visit;
  open_units_ = request.gradients;
}

void VisitPlanner::close_gradients() {
  const StageShape& stage = layout_.stages()[open_.stage];
  pass_ = Pass::backward;
  stage_ = open_.stage;
  for (std::size_t i = 0; i < stage.units.size(); ++i) {
    if (open_.gradients[i] == kNowhere) continue;
    const int unit = stage.units[i];
    for (const Chunk& chunk : layout_.trainable_chunks_of(unit)) {
      const std::uint64_t from = open_.gradients[i] + 4 * chunk.first;
      if (contributions_[unit] == 0)
        stage_gradient(chunk, from);
      else
        accumulate(chunk, from);
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

HostRef VisitPlanner::low_words(int chunk, bool holds) {
  if (arrangement_.gradient_low_resident[chunk]) return {HostRef::Where::resident_gradient_low, chunk};
  const HostRef words = take_word_buffer();
  return holds ? read_extent(ExtentKind::gradient_low, chunk, words) : words;
}

void VisitPlanner::accumulate(const Chunk& chunk, std::uint64_t from) {
  const int id = layout_.first_chunk(chunk.unit) + chunk.index;
  const bool first_sum = contributions_[chunk.unit] == 1;
  const HostRef incoming = take_word_buffer();
  download_gradient(chunk, from, incoming);
  const HostRef high = read_gradient(chunk), low = low_words(id, !first_sum);
  Task& sum = emit(TaskKind::accumulate, Lane::update,
                   {host_access(incoming, false), host_access(high, true), host_access(low, true)});
  sum.chunk = id;
  sum.incoming = incoming;
  sum.gradient = high;
  sum.gradient_low = low;
  sum.first_sum = first_sum;
  sum.bytes = chunk.word_bytes();
  if (high.where == HostRef::Where::word_buffer) write_extent(ExtentKind::gradient, id, high);
  if (low.where == HostRef::Where::word_buffer) write_extent(ExtentKind::gradient_low, id, low);
}

Plan VisitPlanner::owe(const std::vector<int>& units) {
  plan_ = {.first_id = next_id_};
  for (int unit : units) {
    owed_sum_[unit] = contributions_[unit] > 1;
    contributions_[unit] = 0;
    updated_[unit] = false;
  }
  observe(kStep);
  release_holds();  // what was fetched before is stale
  prefetch();
  return std::move(plan_);
}

Plan VisitPlanner::settle(int unit) {
  plan_ = {.first_id = next_id_};
  if (updated_[unit]) return std::move(plan_);
  pass_ = Pass::forward;
  invalidate(unit);
  for (const Chunk& chunk : layout_.trainable_chunks_of(unit)) update_pending(chunk);
  updated_[unit] = true;
  return std::move(plan_);
}

HostRef VisitPlanner::update_pending(const Chunk& chunk) {
  if (!owed_sum_[chunk.unit]) return Planner::update_pending(chunk);
  const int id = layout_.first_chunk(chunk.unit) + chunk.index;
  const HostRef words = read_words(chunk);
  const HostRef high = read_gradient(chunk), low = low_words(id, true);
  emit_update(chunk, words, high, read_state(chunk), low);
  return words;
}

}  // namespace tierflow::swap

#include "swap/planner.h"

#include <algorithm>

#include "swap/access.h"

namespace tierflow::swap {
namespace {

int earliest(std::vector<TaskId>& last_use, TaskId now) {
  const auto found = std::min_element(last_use.begin(), last_use.end());
  *found = now;
  return static_cast<int>(found - last_use.begin());
}

}  // namespace

Planner::Planner(const Layout& layout, const Arrangement& arrangement) : layout_(layout), arrangement_(arrangement) {
  const auto units = layout.units().size();
  updated_.assign(units, false);
  defers_.assign(units, false);
  for (std::size_t id = 0; id < layout.chunks().size(); ++id)
    if (arrangement.deferred[id]) defers_[layout.chunks()[id].unit] = true;
  gradient_of_.assign(units, kNowhere);
  held_offset_.assign(units, kNowhere);
  std::uint64_t held = arrangement.weight_ring + arrangement.gradient_ring;
  for (std::size_t unit = 0; unit < units; ++unit)
    if (layout.gradient_bytes(static_cast<int>(unit)) != 0 && layout.users_of(static_cast<int>(unit)) > 1) {
      held_offset_[unit] = held;
      held += layout.gradient_bytes(static_cast<int>(unit));
    }
  word_last_use_.assign(arrangement.word_buffers, 0);
  state_last_use_.assign(arrangement.state_buffers, 0);
  activation_last_use_.assign(arrangement.activation_buffers, 0);
}

Task& Planner::emit(TaskKind kind, Lane lane, std::vector<Access> accesses) {
  const TaskId id = next_id_++;
  Task& task = plan_.tasks.emplace_back();
  task.kind = kind;
  task.lane = lane;
  task.pass = pass_;
  task.stage = stage_;
  task.dependencies = hazards_.add(id, lane, accesses);
  task.accesses = std::move(accesses);
  return task;
}

HostRef Planner::take_word_buffer() {
  return {HostRef::Where::word_buffer, earliest(word_last_use_, ++use_counter_)};
}
HostRef Planner::take_state_buffer() {
  return {HostRef::Where::state_buffer, earliest(state_last_use_, ++use_counter_)};
}
HostRef Planner::take_activation_buffer() {
  return {HostRef::Where::activation_buffer, earliest(activation_last_use_, ++use_counter_)};
}

Plan Planner::train_step(bool pending) {
  plan_ = {.first_id = next_id_};
  pending_ = pending;
  std::fill(updated_.begin(), updated_.end(), false);
  std::fill(gradient_of_.begin(), gradient_of_.end(), kNowhere);
  const int stages = static_cast<int>(layout_.stages().size());
  for (int stage = 0; stage + 1 < stages; ++stage) plan_.visits.push_back({.stage = stage, .pass = Pass::forward});
  plan_.visits.push_back({.stage = stages - 1, .pass = Pass::head});
  for (int stage = stages - 2; stage >= 0; --stage) plan_.visits.push_back({.stage = stage, .pass = Pass::backward});
  run_visits(arrangement_.micro_batches);
  pending_ = false;
  return std::move(plan_);
}

Plan Planner::evaluate(int micro_batches) {
  plan_ = {.first_id = next_id_};
  for (int stage = 0; stage < static_cast<int>(layout_.stages().size()); ++stage)
    plan_.visits.push_back({.stage = stage, .pass = Pass::evaluate});
  run_visits(micro_batches);
  return std::move(plan_);
}

Plan Planner::flush() {
  plan_ = {.first_id = next_id_};
  pass_ = Pass::forward;
  for (int unit = 0; unit < static_cast<int>(layout_.units().size()); ++unit) {
    if (!defers_[unit]) continue;
    invalidate(unit);
    for (const Chunk& chunk : layout_.chunks_of(unit))
      if (arrangement_.deferred[layout_.first_chunk(unit) + chunk.index]) update_pending(chunk);
  }
  return std::move(plan_);
}

bool Planner::fetch(int visit, bool forced) {
  Visit& target = plan_.visits[visit];
  const StageShape& stage = layout_.stages()[target.stage];
  target.weights.assign(stage.units.size(), kNowhere);
  target.gradients.assign(stage.units.size(), kNowhere);
  target.fresh_gradient.assign(stage.units.size(), false);
  if (target.pass == Pass::backward && !stage.backward_needs_weights) return true;

  const auto owes_update = [&](int unit) { return pending_ && defers_[unit] && !updated_[unit]; };
  std::vector<int> missing;
  std::uint64_t bytes = 0;
  for (int unit : stage.units) {
    if (owes_update(unit)) invalidate(unit);
    if (find_region(unit) != nullptr) continue;
    missing.push_back(unit);
    bytes += 2 * layout_.unit_elements(unit);
  }
  for (int unit : stage.units)
    if (Region* region = find_region(unit)) ++region->busy;
  std::uint64_t begin = missing.empty() ? 0 : allocate_weights(bytes);
  if (begin == kNowhere) {
    for (int unit : stage.units)
      if (Region* region = find_region(unit)) --region->busy;
    if (!forced) return false;
    // What is cached stands in the way: give it up and fetch the whole stage into an empty ring.
    regions_.clear();
    ring_position_ = 0;
    missing = stage.units;
    bytes = 0;
    for (int unit : missing) bytes += 2 * layout_.unit_elements(unit);
    begin = allocate_weights(bytes);
  }
  pass_ = target.pass;
  stage_ = target.stage;
  for (int unit : missing) {
    regions_.push_back({.unit = unit, .begin = begin, .end = begin + 2 * layout_.unit_elements(unit), .busy = 1});
    for (const Chunk& chunk : layout_.chunks_of(unit)) {
      const int id = layout_.first_chunk(unit) + chunk.index;
      const bool owed = owes_update(unit) && arrangement_.deferred[id], on_device = owed && arrangement_.on_device[id];
      const HostRef words = owed && !on_device ? update_pending(chunk) : read_words(chunk);
      const std::uint64_t to = begin + 2 * chunk.first;
      Task& upload = emit(TaskKind::upload_hi, Lane::upload,
                          {host_access(words, false), device_access(to, chunk.word_bytes(), true)});
      upload.chunk = id;
      upload.words = words;
      upload.device_offset = to;
      upload.bytes = chunk.word_bytes();
      if (on_device) update_on_device(chunk, to, kNowhere, words);
    }
    updated_[unit] = true;
    begin += 2 * layout_.unit_elements(unit);
  }
  for (std::size_t i = 0; i < stage.units.size(); ++i) target.weights[i] = find_region(stage.units[i])->begin;
  return true;
}

std::uint64_t Planner::allocate_weights(std::uint64_t bytes) {
  for (const std::uint64_t begin : {ring_position_, std::uint64_t{0}}) {
    if (begin + bytes > arrangement_.weight_ring) continue;
    const auto overlaps = [&](const Region& region) { return region.begin < begin + bytes && begin < region.end; };
    if (std::any_of(regions_.begin(), regions_.end(),
                    [&](const Region& region) { return region.busy > 0 && overlaps(region); }))
      continue;
    std::erase_if(regions_, overlaps);
    ring_position_ = begin + bytes;
    return begin;
  }
  return kNowhere;
}

Planner::Region* Planner::find_region(int unit) {
  const auto found =
      std::find_if(regions_.begin(), regions_.end(), [&](const Region& region) { return region.unit == unit; });
  return found == regions_.end() ? nullptr : &*found;
}

void Planner::invalidate(int unit) {
  std::erase_if(regions_, [&](const Region& region) { return region.unit == unit; });
}

std::uint64_t Planner::gradient_region(int unit, std::vector<bool>& fresh, std::size_t position) {
  fresh[position] = gradient_of_[unit] == kNowhere;
  if (!fresh[position]) return gradient_of_[unit];
  if (held_offset_[unit] != kNowhere) return gradient_of_[unit] = held_offset_[unit];
  const std::uint64_t bytes = layout_.gradient_bytes(unit);
  if (gradient_position_ + bytes > arrangement_.gradient_ring) gradient_position_ = 0;
  gradient_of_[unit] = arrangement_.weight_ring + gradient_position_;
  gradient_position_ += bytes;
  return gradient_of_[unit];
}

}  // namespace tierflow::swap

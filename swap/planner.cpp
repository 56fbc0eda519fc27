#include "swap/planner.h"

#include <algorithm>
#include <utility>

#include "swap/access.h"

namespace tierflow::swap {

Planner::Planner(const Layout& layout, const Arrangement& arrangement)
    : layout_(layout),
      arrangement_(arrangement),
      emitter_(layout, arrangement),
      fetcher_(layout, arrangement, emitter_),
      gradients_(arrangement.weight_ring, arrangement.gradient_ring) {
  for (int item = 0; item < static_cast<int>(arrangement.items.size()); ++item)
    items_[arrangement.items[item].made_by] = items_[arrangement.items[item].read_by] = item;
  const int units = static_cast<int>(layout.units().size());
  held_.assign(units, kNowhere);
  std::uint64_t held = arrangement.weight_ring + arrangement.gradient_ring;
  for (int unit = 0; unit < units; ++unit) {
    if (std::ranges::any_of(layout.chunks_of(unit), [&](const Chunk& chunk) { return arrangement.deferred[chunk.id]; }))
      deferring_.push_back(unit);
    if (layout.gradient_bytes(unit) == 0 || layout.users_of(unit) < 2) continue;
    held_[unit] = held;
    held += layout.gradient_bytes(unit);
  }
}

Plan Planner::train_step(bool pending, bool commits, Updates updates, SparseChunks sparse) {
  updates_ = updates;
  const bool updates_first = pending || sparse.any_missed();
  if (commits && !updates_first) emitter_.commit();
  fetcher_.set_sparse(std::move(sparse));
  for (const int unit : deferring_) fetcher_.owe(unit, pending ? Owed::gradient : Owed::nothing);
  gradient_of_.assign(layout_.units().size(), kNowhere);
  const int stages = static_cast<int>(layout_.stages().size());
  std::vector<Visit> visits;
  for (int stage = 0; stage + 1 < stages; ++stage) visits.push_back({.stage = stage, .pass = Pass::forward});
  visits.push_back({.stage = stages - 1, .pass = Pass::head});
  for (int stage = stages - 2; stage >= 0; --stage) visits.push_back({.stage = stage, .pass = Pass::backward});
  return run(std::move(visits), arrangement_.micro_batches, commits && updates_first);
}

Plan Planner::evaluate(int micro_batches, bool another) {
  fetcher_.set_sparse({});
  const int stages = static_cast<int>(layout_.stages().size()), expected = another ? std::min(stages, kLookahead) : 0;
  std::vector<Visit> visits;
  for (int visit = 0; visit < stages + expected; ++visit)
    visits.push_back({.stage = visit % stages, .pass = Pass::evaluate});
  return run(std::move(visits), micro_batches, false, expected);
}

Plan Planner::flush(bool pending, SparseChunks sparse) {
  fetcher_.set_sparse(std::move(sparse));
  for (const int unit : deferring_) fetcher_.owe(unit, pending ? Owed::gradient : Owed::nothing);
  emitter_.serve(Pass::forward);
  for (const int unit : deferring_) fetcher_.apply_owed(unit);
  fetcher_.catch_up();
  return emitter_.take();
}

Plan Planner::undo() {
  forget_weights();
  emitter_.serve(Pass::forward, -1);
  for (const Chunk& chunk : layout_.chunks()) {
    if (!chunk.trainable) continue;
    for (const ExtentKind kind : {ExtentKind::hi, ExtentKind::state}) emitter_.read_back(kind, chunk.id);
  }
  return emitter_.take();
}

void Planner::forget_weights() {
  for (int unit = 0; unit < static_cast<int>(layout_.units().size()); ++unit) fetcher_.invalidate(unit);
}

Plan Planner::run(std::vector<Visit> visits, int micro_batches, bool commits, int expected) {
  const int all = static_cast<int>(visits.size()), count = all - expected;
  Saved saved{.buffer_of = std::vector<HostRef>(arrangement_.items.size()),
              .slot_of = std::vector<std::uint64_t>(arrangement_.items.size(), kNowhere)};
  const auto computations = [&](const Visit& visit) {
    return visit.pass == Pass::evaluate ? micro_batches : layout_.stages()[visit.stage].computations(micro_batches);
  };
  for (const Visit& visit : visits)
    for (int micro_batch = 0; visit.pass == Pass::backward && micro_batch < computations(visit); ++micro_batch)
      if (const int item = item_of({visit.stage, visit.pass, micro_batch});
          item != -1 && arrangement_.items[item].bytes() != 0)
        saved.items.push_back(item);
  int fetched = 0;
  for (int index = 0; index < count; ++index) {
    while (fetched < all && fetched <= index + kLookahead && fetcher_.fetch(visits[fetched], fetched == index))
      ++fetched;
    Visit& visit = visits[index];
    const bool adds = visit.pass == Pass::head || visit.pass == Pass::backward;
    if (adds) open_gradients(visit);
    // From the head on nothing is saved any more: buffers and slots serve the way back.
    if (visit.pass == Pass::head) bring_back(saved);
    for (int micro_batch = 0; micro_batch < computations(visit); ++micro_batch) {
      compute(visit, micro_batch, saved);
      // Ahead of the updates of this visit and of the weights of others: on the lanes that they share, what the next
      // computation takes would wait for all of these.
      if (adds) bring_back(saved);
    }
    // Every unit's update has run by now, and none of this step's own.
    if (commits && visit.pass == Pass::head) emitter_.commit();
    fetcher_.release(layout_.stages()[visit.stage].units);
    if (adds) take_gradients(visit);
  }
  while (fetched < all && fetcher_.fetch(visits[fetched], false)) ++fetched;
  for (int index = count; index < fetched; ++index) fetcher_.release(layout_.stages()[visits[index].stage].units);
  return emitter_.take();
}

void Planner::compute(const Visit& visit, int micro_batch, Saved& saved) {
  const Computation here{visit.stage, visit.pass, micro_batch};
  const int item = item_of(here);
  if (item == -1) {
    emitter_.compute(visit, micro_batch);
    return;
  }
  const std::uint64_t bytes = arrangement_.items[item].bytes();
  const bool makes = arrangement_.items[item].made_by == here;
  if (makes && bytes != 0) saved.slot_of[item] = next_slot();
  const std::uint64_t slot = std::exchange(saved.slot_of[item], kNowhere);
  Task& task = emitter_.compute(visit, micro_batch, slot, bytes);
  task.item = item;
  task.activations = arrangement_.items[item].activations;
  if (slot == kNowhere) return;
  if (makes)
    save(item, slot);
  else
    --saved.in_slots;
}

int Planner::item_of(const Computation& computation) const {
  const auto found = items_.find(computation);
  return found == items_.end() ? -1 : found->second;
}

std::uint64_t Planner::next_slot() {
  return arrangement_.slot_offset(next_slot_++ % arrangement_.slots);
}

// A task that moves what was saved of an item. words: its place on the host.
Task& Planner::move_saved(TaskKind kind, Lane lane, int item, HostRef words, Access from, Access to) {
  const bool saves = kind == TaskKind::save_activations || kind == TaskKind::write_activations;
  const Computation& serves = saves ? arrangement_.items[item].made_by : arrangement_.items[item].read_by;
  emitter_.serve(serves.pass, serves.stage);
  Task& task = emitter_.emit(kind, lane, {from, to});
  task.micro_batch = serves.micro_batch;
  task.item = item;
  task.words = words;
  task.bytes = arrangement_.items[item].bytes();
  return task;
}

void Planner::save(int item, std::uint64_t slot) {
  const bool on_storage = arrangement_.items[item].on_storage;
  const HostRef words =
      on_storage ? emitter_.take_buffer(HostRef::Where::activation_buffer) : HostRef{HostRef::Where::activations, item};
  move_saved(TaskKind::save_activations, Lane::download, item, words,
             device_access(slot, arrangement_.items[item].bytes(), false), host_access(words, true))
      .device_offset = slot;
  if (on_storage)
    move_saved(TaskKind::write_activations, Lane::disk_write, item, words, host_access(words, false),
               cell_access(Space::stored_activations, item, true));
}

// As far ahead of the backward as buffers and slots allow.
void Planner::bring_back(Saved& saved) {
  const auto read = [&] {
    for (; saved.next_read < saved.items.size(); ++saved.next_read) {
      const int item = saved.items[saved.next_read];
      if (!arrangement_.items[item].on_storage) {
        saved.buffer_of[item] = {HostRef::Where::activations, item};
        continue;
      }
      if (saved.in_buffers == arrangement_.activation_buffers) return;
      const HostRef words = saved.buffer_of[item] = emitter_.take_buffer(HostRef::Where::activation_buffer);
      move_saved(TaskKind::read_activations, Lane::disk_read, item, words,
                 cell_access(Space::stored_activations, item, false), host_access(words, true));
      ++saved.in_buffers;
    }
  };
  read();
  for (; saved.next_load < saved.items.size() && saved.in_slots < arrangement_.slots; ++saved.next_load) {
    const int item = saved.items[saved.next_load];
    const HostRef words = saved.buffer_of[item];
    const std::uint64_t slot = saved.slot_of[item] = next_slot();
    move_saved(TaskKind::load_activations, Lane::upload, item, words, host_access(words, false),
               device_access(slot, arrangement_.items[item].bytes(), true))
        .device_offset = slot;
    ++saved.in_slots;
    if (!arrangement_.items[item].on_storage) continue;
    --saved.in_buffers;
    read();
  }
}

// Where the visit adds to the gradients of its units: each unit has one place a step.
void Planner::open_gradients(Visit& visit) {
  const std::vector<int>& units = layout_.stages()[visit.stage].units;
  for (std::size_t i = 0; i < units.size(); ++i) {
    const std::uint64_t bytes = layout_.gradient_bytes(units[i]);
    if (bytes == 0) continue;
    std::uint64_t& place = gradient_of_[units[i]];
    visit.fresh_gradient[i] = place == kNowhere;
    if (place == kNowhere) place = held_[units[i]] != kNowhere ? held_[units[i]] : gradients_.allocate(bytes);
    visit.gradients[i] = place;
  }
}

// After the last visit that adds to a unit's gradient: keep it for later, or update at once, chunk by chunk. The
// backward runs from the last stage to the first, so the first user of a unit is the last to add to its gradient.
void Planner::take_gradients(const Visit& visit) {
  const std::vector<int>& units = layout_.stages()[visit.stage].units;
  for (std::size_t i = 0; i < units.size(); ++i) {
    if (layout_.first_user(units[i]) != visit.stage) continue;
    bool stale = false;  // the words on the device
    for (const Chunk& chunk : layout_.trainable_chunks_of(units[i])) {
      if (!fetcher_.sparse().uses(chunk)) continue;
      const int id = chunk.id;
      const std::uint64_t gradient_at = visit.gradients[i] + 4 * chunk.first,
                          words_at = visit.weights[i] == kNowhere ? kNowhere : visit.weights[i] + chunk.word_place();
      if (arrangement_.deferred[id] && updates_ == Updates::as_arranged) {
        emitter_.take_gradient(id, gradient_at);
        continue;
      }
      if (arrangement_.on_device[id] && words_at != kNowhere) {  // where they lie
        emitter_.update_on_device(id, words_at, gradient_at, emitter_.place(ExtentKind::hi, id));
        continue;
      }
      stale = true;
      const HostRef gradient = emitter_.place(ExtentKind::gradient, id);
      emitter_.download(ExtentKind::gradient, id, gradient_at, gradient);
      const bool on_its_way = arrangement_.resident(ExtentKind::hi, id) || words_at == kNowhere;
      const HostRef words = on_its_way ? emitter_.read(ExtentKind::hi, id) : emitter_.place(ExtentKind::hi, id);
      if (!on_its_way) emitter_.download(ExtentKind::hi, id, words_at, words);
      emitter_.update(id, words, {gradient}, /*measures=*/true);
    }
    if (stale) fetcher_.invalidate(units[i]);
  }
}

}  // namespace tierflow::swap

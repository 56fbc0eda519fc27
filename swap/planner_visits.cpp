// A plan's visits in their order: weights fetched ahead, what a forward saves on its way out and back.
#include <utility>

#include "swap/access.h"
#include "swap/planner.h"

namespace tierflow::swap {

// What a step saves of its micro-batches and where it is: one piece for each item, in the order in which the backward
// takes them. Each waits in a buffer of the host, if it was on storage, and then in a slot of the device.
struct Planner::Saved {
  std::vector<int> items;
  std::size_t next_read = 0, next_load = 0;
  int in_buffers = 0, in_slots = 0;  // read and not loaded; loaded and not computed with
  std::vector<HostRef> buffer_of;    // by item
  std::vector<std::uint64_t> slot_of;
};

void Planner::run_visits(int micro_batches) {
  const int visits = static_cast<int>(plan_.visits.size());
  Saved saved{.buffer_of = std::vector<HostRef>(arrangement_.items()),
              .slot_of = std::vector<std::uint64_t>(arrangement_.items(), kNowhere)};
  const auto item_of = [&](int stage, int micro_batch) { return stage * arrangement_.micro_batches + micro_batch; };
  for (const Visit& visit : plan_.visits)
    for (int micro_batch = 0; visit.pass == Pass::backward && micro_batch < micro_batches; ++micro_batch)
      if (arrangement_.saved_bytes(layout_, item_of(visit.stage, micro_batch)) != 0)
        saved.items.push_back(item_of(visit.stage, micro_batch));
  int fetched = 0;
  for (int visit = 0; visit < visits; ++visit) {
    while (fetched < visits && fetched <= visit + kLookahead && fetch(fetched, fetched == visit)) ++fetched;
    const int stage = plan_.visits[visit].stage;
    const Pass pass = plan_.visits[visit].pass;
    for (int micro_batch = 0; micro_batch < micro_batches; ++micro_batch) {
      const int item = item_of(stage, micro_batch);
      const bool saves = pass == Pass::forward && arrangement_.saved_bytes(layout_, item) != 0;
      // From the head on nothing is saved any more: buffers and slots serve the way back.
      if (pass == Pass::head || pass == Pass::backward) bring_back(saved);
      pass_ = pass;
      stage_ = stage;
      std::uint64_t& slot = saved.slot_of[item];
      if (saves) slot = next_slot();
      compute(visit, micro_batch, pass == Pass::forward || pass == Pass::backward ? slot : kNowhere);
      if (saves) save(item, std::exchange(slot, kNowhere));
      if (pass == Pass::backward && std::exchange(slot, kNowhere) != kNowhere) --saved.in_slots;
    }
    for (int unit : layout_.stages()[stage].units)
      if (Region* region = find_region(unit); region != nullptr && region->busy > 0) --region->busy;
    if (pass == Pass::backward || pass == Pass::head) take_gradients(plan_.visits[visit]);
  }
}

void Planner::compute(int visit, int micro_batch, std::uint64_t slot) {
  Visit& target = plan_.visits[visit];
  const StageShape& stage = layout_.stages()[target.stage];
  const int item = target.stage * arrangement_.micro_batches + micro_batch;
  std::vector<Access> accesses;
  for (std::size_t i = 0; i < stage.units.size(); ++i) {
    const int unit = stage.units[i];
    if (target.weights[i] != kNowhere)
      accesses.push_back(device_access(target.weights[i], 2 * layout_.unit_elements(unit), false));
    if ((target.pass != Pass::backward && target.pass != Pass::head) || layout_.gradient_bytes(unit) == 0) continue;
    if (target.gradients[i] == kNowhere) target.gradients[i] = gradient_region(unit, target.fresh_gradient, i);
    accesses.push_back(device_access(target.gradients[i], layout_.gradient_bytes(unit), true));
  }
  if (slot != kNowhere) accesses.push_back(device_access(slot, arrangement_.saved_bytes(layout_, item), true));
  Task& task = emit(TaskKind::compute, Lane::compute, std::move(accesses));
  task.visit = visit;
  task.micro_batch = micro_batch;
  task.device_offset = slot;
  if (target.pass == Pass::forward || target.pass == Pass::backward) task.activations = arrangement_.activations[item];
}

std::uint64_t Planner::next_slot() {
  return arrangement_.slot_offset(next_slot_++ % arrangement_.slots);
}

// A task that moves what was saved of an item. words: its place on the host.
Task& Planner::move_saved(TaskKind kind, Lane lane, int item, HostRef words, Access from, Access to) {
  pass_ = kind == TaskKind::save_activations || kind == TaskKind::write_activations ? Pass::forward : Pass::backward;
  stage_ = item / arrangement_.micro_batches;
  Task& task = emit(kind, lane, {from, to});
  task.micro_batch = item % arrangement_.micro_batches;
  task.words = words;
  task.bytes = arrangement_.saved_bytes(layout_, item);
  return task;
}

void Planner::save(int item, std::uint64_t slot) {
  const std::uint64_t bytes = arrangement_.saved_bytes(layout_, item);
  const bool on_storage = arrangement_.saved_on_storage[item];
  const HostRef words = on_storage ? take_activation_buffer() : HostRef{HostRef::Where::activations, item};
  move_saved(TaskKind::save_activations, Lane::download, item, words, device_access(slot, bytes, false),
             host_access(words, true))
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
      if (!arrangement_.saved_on_storage[item]) {
        saved.buffer_of[item] = {HostRef::Where::activations, item};
        continue;
      }
      if (saved.in_buffers == arrangement_.activation_buffers) return;
      const HostRef words = saved.buffer_of[item] = take_activation_buffer();
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
               device_access(slot, arrangement_.saved_bytes(layout_, item), true))
        .device_offset = slot;
    ++saved.in_slots;
    if (!arrangement_.saved_on_storage[item]) continue;
    --saved.in_buffers;
    read();
  }
}

}  // namespace tierflow::swap

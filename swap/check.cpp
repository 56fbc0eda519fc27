#include "swap/check.h"

#include <utility>

namespace tierflow::swap {

PlanChecker::PlanChecker(const Layout& layout, const Arrangement& arrangement)
    : layout_(layout), arrangement_(arrangement), ledger_(layout, arrangement), rules_(layout, arrangement, ledger_) {
  parts_.assign(layout.units().size(), 0);
  due_.assign(layout.chunks().size(), 0);
  for (const StageShape& stage : layout.stages())
    for (const int unit : stage.units) parts_[unit] += stage.computations(arrangement.micro_batches);
}

io::Error PlanChecker::train_step(const Plan& plan, bool pending, bool commits, Updates updates, SparseChunks sparse) {
  begin_step(pending, commits, updates, std::move(sparse));
  return finish(plan);
}

io::Error PlanChecker::undo(const Plan& plan) {
  begin_undo();
  return finish(plan);
}

void PlanChecker::begin_undo() {
  const bool speculated = expected_.speculates;
  for (const Chunk& chunk : layout_.chunks()) {
    if (!chunk.trainable) continue;
    --due_[chunk.id];
    if (sparse_.uses(chunk)) rules_.go_back(chunk.id);
  }
  begin_plan({.undoes = true});
  if (!speculated) ledger_.wrong("undoes a step that was not speculative");
}

io::Error PlanChecker::flush(const Plan& plan, bool pending, SparseChunks sparse) {
  begin_flush(pending, std::move(sparse));
  return finish(plan);
}

void PlanChecker::begin_flush(bool pending, SparseChunks sparse) {
  deferred_step_ = step_;
  begin_plan({.deferred_updates = pending ? 1 : 0}, std::move(sparse));
}

io::Error PlanChecker::evaluate(const Plan& plan) {
  begin_evaluation();
  return finish(plan);
}

void PlanChecker::begin_evaluation() {
  begin_plan({});
}

void PlanChecker::begin_step(bool pending, bool commits, Updates updates, SparseChunks sparse) {
  deferred_step_ = step_++;
  const bool speculates = updates == Updates::at_once;
  begin_plan({.deferred_updates = pending ? 1 : 0,
              .updates = 1,
              .measurements = 1,
              .items = 1,
              .commits = commits || speculates ? 1 : 0,
              .speculates = speculates},
             std::move(sparse));
}

void PlanChecker::begin_plan(const Expected& expected, SparseChunks sparse) {
  expected_ = expected;
  sparse_ = std::move(sparse);
  ledger_.begin_plan();
  rules_.begin_plan();
  commits_ = 0;
  made_.assign(arrangement_.items.size(), 0);
  read_.assign(arrangement_.items.size(), 0);
  // Computed with: the weights after every update that is owed, before this step's own.
  used_version_.clear();
  for (const Chunk& chunk : layout_.chunks()) {
    if (arrangement_.deferred[chunk.id]) due_[chunk.id] += expected.deferred_updates;
    const bool moved = sparse_.uses(chunk) || sparse_.catches_up(chunk) ||
                       (sparse_.owes(chunk) && arrangement_.deferred[chunk.id] && expected.deferred_updates != 0);
    used_version_.push_back(moved ? due_[chunk.id] : rules_.version(chunk.id));
  }
}

void PlanChecker::play(const Plan& part) {
  ledger_.play(part, [&](const Task& task) {
    switch (task.kind) {
      case TaskKind::compute:
        return compute(task, part);
      case TaskKind::commit:
        return commit();
      case TaskKind::save_activations:
      case TaskKind::load_activations:
      case TaskKind::write_activations:
      case TaskKind::read_activations:
        return move_item(task);
      default:
        if (!rules_.names_chunk(task)) return;
    }
    if (task.kind == TaskKind::update)
      update(task);
    else if (task.kind == TaskKind::catch_up)
      catch_up(task);
    else if (task.kind == TaskKind::measure)
      rules_.measure(task, {What::gradient, task.chunk, step_});
    else if (task.kind == TaskKind::update_on_device)
      update_on_device(task);
    else if (task.kind == TaskKind::keep_gradient)
      keep_gradient(task);
    else if (!rules_.move(task))
      move(task);
  });
}

io::Error PlanChecker::finish(const Plan& rest) {
  play(rest);
  for (const Chunk& chunk : layout_.chunks()) {
    const int updated = rules_.updated(chunk.id), measured = rules_.measured(chunk.id);
    const bool in_backward = chunk.trainable && !defers(chunk.id);
    const int owed = arrangement_.deferred[chunk.id] && sparse_.owes(chunk) ? expected_.deferred_updates : 0,
              own = in_backward && sparse_.uses(chunk) ? expected_.updates : 0;
    if (in_backward) due_[chunk.id] += expected_.updates;
    if (chunk.sparse && !expected_.undoes && rules_.version(chunk.id) != used_version_[chunk.id] + own)
      ledger_.wrong("chunk " + std::to_string(chunk.id) + " has not what it missed");
    if (updated != owed + own)
      ledger_.wrong("chunk " + std::to_string(chunk.id) + " was updated " + std::to_string(updated) + " times");
    for (const ExtentKind kind : {ExtentKind::hi, ExtentKind::state})
      if (expected_.undoes && chunk.trainable &&
          ledger_.home(kind, chunk.id).content.version != rules_.version(chunk.id))
        ledger_.wrong("chunk " + std::to_string(chunk.id) + " is not what it was before the step");
    if (measured != (defers(chunk.id) && sparse_.uses(chunk) ? expected_.measurements : 0))
      ledger_.wrong("chunk " + std::to_string(chunk.id) + " was measured " + std::to_string(measured) + " times");
  }
  for (std::size_t item = 0; item < made_.size(); ++item)
    if (made_[item] != expected_.items || read_[item] != expected_.items)
      ledger_.wrong("item " + std::to_string(item) + " was made " + std::to_string(made_[item]) + " times and read " +
                    std::to_string(read_[item]) + " times");
  if (commits_ != expected_.commits) ledger_.wrong("it commits " + std::to_string(commits_) + " times");
  return ledger_.error();
}

// What the step before left: with the updates that it deferred, without any of this step's.
void PlanChecker::commit() {
  ++commits_;
  rules_.commit(used_version_);
}

Content PlanChecker::gradient_of(int chunk) const {
  return {What::gradient, chunk, owes(chunk) ? deferred_step_ : step_};
}

Content PlanChecker::whole_sum(int chunk, int step) const {
  const int unit = layout_.chunks()[chunk].unit;
  return {What::sum, unit, step, parts_[unit]};
}

void PlanChecker::move(const Task& task) {
  Ledger::Held &stored = ledger_.stored(ExtentKind::gradient, task.chunk), &host = ledger_.host(task.gradient);
  const Content applied = gradient_of(task.chunk), fresh{What::gradient, task.chunk, step_};
  switch (task.kind) {
    case TaskKind::read_gradient:
      ledger_.read(stored, applied, "storage");
      return ledger_.write(host, applied);
    case TaskKind::write_gradient:
      if (rules_.measured(task.chunk) == 0) ledger_.wrong("the gradient has not been measured");
      ledger_.read(host, fresh, "the host buffer");
      return ledger_.write(stored, fresh);
    case TaskKind::upload_gradient:
      ledger_.read(host, applied, "the host buffer");
      return ledger_.write_device(task.device_offset, task.bytes, applied);
    case TaskKind::download_gradient:
      ledger_.read_device(task.device_offset, 2 * task.bytes, whole_sum(task.chunk, step_));
      return ledger_.write(host, fresh);
    default:
      return ledger_.wrong("is of no kind that a layer-major plan has");
  }
}

// Out and back.
void PlanChecker::move_item(const Task& task) {
  const Item* item = item_of(task);
  if (item == nullptr) return;
  const bool out = task.kind == TaskKind::save_activations || task.kind == TaskKind::write_activations;
  if (Computation{task.stage, task.pass, task.micro_batch} != (out ? item->made_by : item->read_by))
    return ledger_.wrong("does not serve who makes or reads its item");
  if (task.bytes != item->bytes()) return ledger_.wrong("moves another number of bytes");
  const Content content{What::item, task.item, step_};
  Ledger::Held &host = ledger_.host(task.words), &stored = ledger_.stored(ExtentKind::activations, task.item);
  switch (task.kind) {
    case TaskKind::save_activations:
      ledger_.read_device(task.device_offset, task.bytes, content);
      return ledger_.write(host, content);
    case TaskKind::write_activations:
      ledger_.read(host, content, "the host buffer");
      return ledger_.write(stored, content);
    case TaskKind::read_activations:
      ledger_.read(stored, content, "storage");
      return ledger_.write(host, content);
    default:
      ledger_.read(host, content, "the host copy");
      return ledger_.write_device(task.device_offset, task.bytes, content);
  }
}

// Null, and what is wrong is said, where the task names none that there is.
const Item* PlanChecker::item_of(const Task& task) {
  if (task.item >= 0 && task.item < static_cast<int>(arrangement_.items.size())) return &arrangement_.items[task.item];
  ledger_.wrong("names no item");
  return nullptr;
}

void PlanChecker::compute(const Task& task, const Plan& plan) {
  if (task.visit < 0 || task.visit >= static_cast<int>(plan.visits.size())) return ledger_.wrong("belongs to no visit");
  const Visit& visit = plan.visits[task.visit];
  if (task.stage != visit.stage || task.pass != visit.pass) return ledger_.wrong("is not of its visit");
  const StageShape& stage = layout_.stages()[task.stage];
  const bool gradients = task.pass == Pass::backward || task.pass == Pass::head;
  const bool weights = task.pass != Pass::backward || stage.backward_needs_weights;
  for (std::size_t position = 0; position < stage.units.size(); ++position) {
    const int unit = stage.units[position];
    if (weights && visit.weights[position] == kNowhere) return ledger_.wrong("the visit has no weights");
    if (weights) read_weights(visit.weights[position], unit);
    if (gradients && layout_.gradient_bytes(unit) != 0) sum_gradient(task, visit, position, unit);
  }
  if (task.item != -1) use_item(task);
}

void PlanChecker::read_weights(std::uint64_t begin, int unit) {
  if (ledger_.reads_again(begin, layout_.unit_word_bytes(unit))) return;
  for (const Chunk& chunk : layout_.chunks_of(unit))
    if (sparse_.uses(chunk))
      ledger_.read_device(begin + chunk.word_place(), chunk.word_bytes(),
                          {What::words, chunk.id, used_version_[chunk.id]});
  ledger_.has_read(begin, layout_.unit_word_bytes(unit));
}

// Makes or reads it.
void PlanChecker::use_item(const Task& task) {
  const Item* item = item_of(task);
  if (item == nullptr) return;
  const Computation here{task.stage, task.pass, task.micro_batch};
  const bool makes = item->made_by == here;
  if (!makes && item->read_by != here) return ledger_.wrong("neither makes nor reads its item");
  ++(makes ? made_ : read_)[task.item];
  if (task.activations != item->activations) return ledger_.wrong("does not do as arranged with its activations");
  const std::uint64_t bytes = item->bytes();
  if ((bytes == 0) != (task.device_offset == kNowhere)) return ledger_.wrong("has no slot for its item");
  if (bytes == 0) return;
  const Content content{What::item, task.item, step_};
  if (!makes) ledger_.read_device(task.device_offset, bytes, content);
  // Who reads it may use the slot's bytes for itself.
  ledger_.write_device(task.device_offset, bytes, makes ? content : Content{});
}

// A gradient grows by one part a micro-batch; the first of a fresh one starts from nothing.
void PlanChecker::sum_gradient(const Task& task, const Visit& visit, std::size_t position, int unit) {
  const std::uint64_t begin = visit.gradients[position], bytes = layout_.gradient_bytes(unit);
  if (begin == kNowhere)
    return ledger_.wrong("the visit has no place for the gradient of unit " + std::to_string(unit));
  Content sum{What::sum, unit, step_, 0};
  if (task.micro_batch != 0 || !visit.fresh_gradient[position]) {
    sum.parts = ledger_.on_device(begin).parts;
    ledger_.read_device(begin, bytes, sum);
  }
  ++sum.parts;
  ledger_.write_device(begin, bytes, sum);
}

void PlanChecker::catch_up(const Task& task) {
  if (!sparse_.catches_up(layout_.chunks()[task.chunk]) || owes(task.chunk))
    ledger_.wrong("catches up with what the chunk has not missed");
  rules_.catch_up(task, due_[task.chunk]);
}

void PlanChecker::update(const Task& task) {
  if (task.measures == owes(task.chunk)) ledger_.wrong("measures another gradient than the step's own");
  ledger_.read(ledger_.host(task.gradient), gradient_of(task.chunk), "the gradient");
  rules_.update(task);
}

void PlanChecker::update_on_device(const Task& task) {
  const Chunk& chunk = layout_.chunks()[task.chunk];
  const Content gradient = gradient_of(task.chunk);
  if (!has_slot(task)) return ledger_.wrong("has no slot");
  const std::uint64_t rounded = task.held_gradient == kNowhere ? task.slot : task.held_gradient;
  if (task.sum == kNowhere) {
    ledger_.read_device(rounded, chunk.word_bytes(), gradient);
  } else {
    ledger_.read_device(task.sum, 4 * chunk.elements, whole_sum(task.chunk, gradient.version));
    ledger_.write_device(rounded, chunk.word_bytes(), gradient);
  }
  rules_.update_on_device(task);
}

bool PlanChecker::has_slot(const Task& task) const {
  const std::uint64_t begin = arrangement_.update_slots_begin(), bytes = arrangement_.update_slots.bytes;
  return task.slot >= begin && task.slot < arrangement_.update_slots_end() && (task.slot - begin) % bytes == 0;
}

void PlanChecker::keep_gradient(const Task& task) {
  if (!has_slot(task) || task.sum == kNowhere || task.held_gradient == kNowhere)
    return ledger_.wrong("has no slot, no sum or no place for it");
  ledger_.read_device(task.sum, 4 * layout_.chunks()[task.chunk].elements, whole_sum(task.chunk, step_));
  rules_.keep_gradient(task, {What::gradient, task.chunk, step_});
}

}  // namespace tierflow::swap

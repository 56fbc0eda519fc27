#include "swap/check.h"

#include <algorithm>
#include <tuple>

namespace tierflow::swap {

PlanChecker::PlanChecker(const Layout& layout, const Arrangement& arrangement)
    : layout_(layout), arrangement_(arrangement) {
  const std::size_t chunks = layout.chunks().size();
  words_.resize(arrangement.word_buffers);
  states_.resize(arrangement.state_buffers);
  saved_.resize(arrangement.items());
  stored_saved_.resize(arrangement.items());
  activation_buffers_.resize(arrangement.activation_buffers);
  for (auto* list : {&resident_[0], &resident_[1], &resident_[2], &stored_[0], &stored_[1], &stored_[2]})
    list->resize(chunks);
  version_.assign(chunks, 0);
  for (int id = 0; id < static_cast<int>(chunks); ++id) {
    (arrangement.hi_resident[id] ? resident_[0][id] : stored_[0][id]).content = {What::words, id};
    (arrangement.state_resident[id] ? resident_[1][id] : stored_[1][id]).content = {What::state, id};
  }
}

io::Error PlanChecker::train_step(const Plan& plan, bool pending) {
  deferred_step_ = step_++;
  // Computed with: the weights after every update that is owed, before this step's own.
  play(plan, pending ? 1 : 0);
  return expect_each_chunk(pending ? 1 : 0, 1, 1);
}

io::Error PlanChecker::flush(const Plan& plan) {
  deferred_step_ = step_;
  play(plan, 1);
  return expect_each_chunk(1, 0, 0);
}

io::Error PlanChecker::evaluate(const Plan& plan) {
  play(plan, 0);
  return expect_each_chunk(0, 0, 0);
}

io::Error PlanChecker::expect_each_chunk(int deferred_updates, int updates, int measurements) {
  task_ = nullptr;
  for (std::size_t id = 0; id < updated_.size(); ++id) {
    const bool trained = layout_.chunks()[id].trainable, deferred = arrangement_.deferred[id];
    if (updated_[id] != (deferred ? deferred_updates : trained ? updates : 0))
      wrong("chunk " + std::to_string(id) + " was updated " + std::to_string(updated_[id]) + " times");
    if (measured_[id] != (deferred ? measurements : 0))
      wrong("chunk " + std::to_string(id) + " was measured " + std::to_string(measured_[id]) + " times");
  }
  if (problem_.empty()) return {};
  return {.kind = io::ErrorKind::corruption, .operation = "check the plan", .detail = problem_};
}

void PlanChecker::play(const Plan& plan, int deferred_due) {
  problem_.clear();
  due_ = version_;
  for (std::size_t id = 0; id < due_.size(); ++id)
    if (arrangement_.deferred[id]) due_[id] += deferred_due;
  updated_.assign(version_.size(), 0);
  measured_.assign(version_.size(), 0);
  if (dependencies_begin_.empty()) {
    first_id_ = plan.first_id;
    dependencies_begin_ = {0};
  }
  id_ = plan.first_id;
  for (const Task& task : plan.tasks) {
    task_ = &task;
    const auto begin = dependencies_.insert(dependencies_.end(), task.dependencies.begin(), task.dependencies.end());
    std::sort(begin, dependencies_.end());
    dependencies_begin_.push_back(dependencies_.size());
    seen_.push_back(0);
    if (!task.dependencies.empty() && dependencies_.back() >= id_)
      return wrong("depends on a later task: the lanes would deadlock");
    if (task.kind == TaskKind::compute)
      compute(task, plan);
    else if (task.kind == TaskKind::update || task.kind == TaskKind::measure)
      update(task);
    else if (task.kind == TaskKind::update_on_device)
      update_on_device(task);
    else
      move(task);
    if (!problem_.empty()) return;
    ++id_;
  }
}

void PlanChecker::move(const Task& task) {
  const bool saved = task.kind == TaskKind::save_activations || task.kind == TaskKind::load_activations ||
                     task.kind == TaskKind::write_activations || task.kind == TaskKind::read_activations;
  if (saved) return move_saved(task);
  if (task.chunk < 0 || task.chunk >= static_cast<int>(version_.size())) return wrong("names no chunk");
  const Content words{What::words, task.chunk, version_[task.chunk]},
      state{What::state, task.chunk, version_[task.chunk]};
  const auto stage_in = [&](ExtentKind kind, const HostRef& to, const Content& content) {
    read(stored(kind, task.chunk), content, "storage");
    write(host(to), content);
  };
  const auto stage_out = [&](const HostRef& from, ExtentKind kind, const Content& content) {
    read(host(from), content, "the host buffer");
    write(stored(kind, task.chunk), content);
  };
  switch (task.kind) {
    case TaskKind::read_hi:
      return stage_in(ExtentKind::hi, task.words, words);
    case TaskKind::read_state:
      return stage_in(ExtentKind::state, task.state, state);
    case TaskKind::read_gradient:
      return stage_in(ExtentKind::gradient, task.gradient, {What::gradient, task.chunk, gradient_of(task.chunk)});
    case TaskKind::write_hi:
      return stage_out(task.words, ExtentKind::hi, words);
    case TaskKind::write_state:
      return stage_out(task.state, ExtentKind::state, state);
    case TaskKind::write_gradient:
      if (measured_[task.chunk] == 0) wrong("the gradient has not been measured");
      return stage_out(task.gradient, ExtentKind::gradient, {What::gradient, task.chunk, step_});
    case TaskKind::upload_hi:
      read(host(task.words), words, "the host buffer");
      return write_device(task.device_offset, task.bytes, words);
    case TaskKind::download_hi:
      read_device(task.device_offset, task.bytes, words);
      return write(host(task.words), words);
    case TaskKind::upload_state:
      read(host(task.state), state, "the host buffer");
      return write_device(task.device_offset, task.bytes, state);
    case TaskKind::download_state:
      read_device(task.device_offset, task.bytes, state);
      return write(host(task.state), state);
    case TaskKind::upload_gradient: {
      const Content gradient{What::gradient, task.chunk, gradient_of(task.chunk)};
      read(host(task.gradient), gradient, "the host buffer");
      return write_device(task.device_offset, task.bytes, gradient);
    }
    case TaskKind::download_gradient: {
      const int unit = layout_.chunks()[task.chunk].unit;
      read_device(task.device_offset, 2 * task.bytes,
                  {What::sum, unit, step_, layout_.users_of(unit) * arrangement_.micro_batches});
      return write(host(task.gradient), {What::gradient, task.chunk, step_});
    }
    default:
      return wrong("is of no kind that a layer-major plan has");
  }
}

// What a stage saves of a micro-batch, out and back.
void PlanChecker::move_saved(const Task& task) {
  const int item = item_of(task);
  if (item < 0) return;
  if (task.bytes != arrangement_.saved_bytes(layout_, item)) return wrong("moves another number of bytes");
  const Content content{What::saved, task.stage, step_, task.micro_batch};
  switch (task.kind) {
    case TaskKind::save_activations:
      read_device(task.device_offset, task.bytes, content);
      return write(host(task.words), content);
    case TaskKind::write_activations:
      read(host(task.words), content, "the host buffer");
      return write(stored_saved_[item], content);
    case TaskKind::read_activations:
      read(stored_saved_[item], content, "storage");
      return write(host(task.words), content);
    default:
      read(host(task.words), content, "the host copy");
      return write_device(task.device_offset, task.bytes, content);
  }
}

// -1, and what is wrong is said, where the task names no stage and micro-batch.
int PlanChecker::item_of(const Task& task) {
  const int item = task.stage * arrangement_.micro_batches + task.micro_batch;
  if (task.stage >= 0 && task.micro_batch >= 0 && task.micro_batch < arrangement_.micro_batches &&
      item < arrangement_.items())
    return item;
  wrong("names no micro-batch of a stage");
  return -1;
}

void PlanChecker::compute(const Task& task, const Plan& plan) {
  if (task.visit < 0 || task.visit >= static_cast<int>(plan.visits.size())) return wrong("belongs to no visit");
  const Visit& visit = plan.visits[task.visit];
  const StageShape& stage = layout_.stages()[task.stage];
  const bool gradients = task.pass == Pass::backward || task.pass == Pass::head;
  const bool weights = task.pass != Pass::backward || stage.backward_needs_weights;
  for (std::size_t position = 0; position < stage.units.size(); ++position) {
    const int unit = stage.units[position];
    if (weights && visit.weights[position] == kNowhere) return wrong("the visit has no weights");
    if (weights)
      for (const Chunk& chunk : layout_.chunks_of(unit)) {
        const int id = layout_.first_chunk(unit) + chunk.index;
        read_device(visit.weights[position] + 2 * chunk.first, chunk.word_bytes(), {What::words, id, due_[id]});
      }
    if (gradients && layout_.gradient_bytes(unit) != 0) sum_gradient(task, visit, position, unit);
  }
  if (task.pass != Pass::forward && task.pass != Pass::backward) return;
  const int item = item_of(task);
  if (item < 0) return;
  const std::uint64_t bytes = arrangement_.saved_bytes(layout_, item);
  if (task.activations != arrangement_.activations[item]) return wrong("does not do as arranged with its activations");
  if ((bytes == 0) != (task.device_offset == kNowhere)) return wrong("has no slot for what it saves");
  if (bytes == 0) return;
  const Content content{What::saved, task.stage, step_, task.micro_batch};
  if (task.pass == Pass::backward) read_device(task.device_offset, bytes, content);
  // The backward may use the slot's bytes for itself.
  write_device(task.device_offset, bytes, task.pass == Pass::forward ? content : Content{});
}

// A gradient grows by one part a micro-batch; the first of a fresh one starts from nothing.
void PlanChecker::sum_gradient(const Task& task, const Visit& visit, std::size_t position, int unit) {
  const std::uint64_t begin = visit.gradients[position], bytes = layout_.gradient_bytes(unit);
  if (begin == kNowhere) return wrong("the visit has no place for the gradient of unit " + std::to_string(unit));
  Content sum{What::sum, unit, step_, 0};
  if (task.micro_batch != 0 || !visit.fresh_gradient[position]) {
    const auto found = device_.find(begin);
    if (found != device_.end()) sum.parts = found->second.content.parts;
    read_device(begin, bytes, sum);
  }
  ++sum.parts;
  write_device(begin, bytes, sum);
}

void PlanChecker::update(const Task& task) {
  if (task.chunk < 0 || task.chunk >= static_cast<int>(version_.size())) return wrong("names no chunk");
  if (task.kind == TaskKind::measure) return measure(task, {What::gradient, task.chunk, step_});
  read(host(task.gradient), {What::gradient, task.chunk, gradient_of(task.chunk)}, "the gradient");
  renew(task);
}

void PlanChecker::measure(const Task& task, const Content& content) {
  Held& gradient = host(task.gradient);
  ++measured_[task.chunk];
  read(gradient, content, "the gradient");
  // What writes it to storage takes the checksum made here along.
  if (task.gradient.where == HostRef::Where::word_buffer) write(gradient, content);
}

// The words and the state of an update on the host.
void PlanChecker::renew(const Task& task) {
  const int before = version_[task.chunk]++;
  ++updated_[task.chunk];
  for (const auto& [ref, what] : {std::pair{&task.words, What::words}, std::pair{&task.state, What::state}}) {
    Held& held = host(*ref);
    read(held, {what, task.chunk, before}, what == What::words ? "the words" : "the state");
    write(held, {what, task.chunk, before + 1});
  }
}

void PlanChecker::update_on_device(const Task& task) {
  if (task.chunk < 0 || task.chunk >= static_cast<int>(version_.size())) return wrong("names no chunk");
  const Chunk& chunk = layout_.chunks()[task.chunk];
  const Content gradient{What::gradient, task.chunk, gradient_of(task.chunk)};
  if (task.slot == kNowhere) return wrong("has no slot");
  if (task.sum == kNowhere) {
    read_device(task.slot, chunk.word_bytes(), gradient);
  } else {
    read_device(task.sum, 4 * chunk.elements,
                {What::sum, chunk.unit, gradient.version, layout_.users_of(chunk.unit) * arrangement_.micro_batches});
    write_device(task.slot, chunk.word_bytes(), gradient);
  }
  const int before = version_[task.chunk]++;
  ++updated_[task.chunk];
  const UpdateSlots& slots = arrangement_.update_slots;
  for (const auto& [begin, bytes, what] : {std::tuple{task.device_offset, chunk.word_bytes(), What::words},
                                           std::tuple{task.slot + slots.state, chunk.state_bytes, What::state}}) {
    read_device(begin, bytes, {what, task.chunk, before});
    write_device(begin, bytes, {what, task.chunk, before + 1});
  }
  write_device(task.slot + slots.scratch, slots.bytes - slots.scratch, {});
}

void PlanChecker::wrong(const std::string& detail) {
  if (!problem_.empty()) return;
  problem_ = "at the end of the plan: ";
  if (task_ != nullptr)
    problem_ = "task " + std::to_string(id_) + " (" + task_name(task_->kind) + ", stage " +
               std::to_string(task_->stage) + ", chunk " + std::to_string(task_->chunk) + "): ";
  problem_ += detail;
}

}  // namespace tierflow::swap

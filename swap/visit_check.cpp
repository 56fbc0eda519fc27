#include "swap/visit_check.h"

#include <algorithm>

namespace tierflow::swap {

VisitChecker::VisitChecker(const Layout& layout, const Arrangement& arrangement)
    : layout_(layout),
      ledger_(layout, arrangement),
      rules_(layout, arrangement, ledger_),
      keeps_sums_(!arrangement.gradient_low_resident.empty()) {
  sums_.resize(layout.units().size());
  for (auto* list : {&taken_, &taken_serial_, &used_version_}) list->assign(layout.chunks().size(), 0);
}

io::Error VisitChecker::visit(const Plan& plan, const VisitRequest& request) {
  // Where units may be needed yet, the stage's own gradients stay until the visit's end.
  const bool stays = request.gradients_stay || !layout_.stages()[request.stage].on_demand.empty();
  open_stage_ = stays ? request.stage : -1;
  gradients_stayed_ = visit_.gradients_stay;
  visit_ = request;
  return finish(plan, &request);
}

io::Error VisitChecker::need(const Plan& plan, const NeedRequest& request) {
  need_ = &request;
  io::Error error = finish(plan, &visit_);
  need_ = nullptr;
  return error;
}

io::Error VisitChecker::close(const Plan& plan) {
  open_stage_ = -1;
  return finish(plan, nullptr);
}

io::Error VisitChecker::owe(const Plan& plan, const std::vector<int>& units) {
  for (const int unit : units) {
    Sum& sum = sums_[unit];
    if (sum.visits == 0 || sum.parts != 0)
      return {.kind = io::ErrorKind::corruption,
              .operation = "check the plan",
              .detail = "unit " + std::to_string(unit) + " has no gradient that could be owed"};
    sum.owed = Owed{sum.epoch, sum.visits};
    drop(unit);
    for (const Chunk& chunk : layout_.trainable_chunks_of(unit)) ++used_version_[chunk.id];
  }
  return finish(plan, nullptr);
}

io::Error VisitChecker::apply_owed(const Plan& plan, int unit) {
  io::Error error = finish(plan, nullptr);
  if (!error && sums_[unit].owed)
    error = {.kind = io::ErrorKind::corruption,
             .operation = "check the plan",
             .detail = "unit " + std::to_string(unit) + " still owes its update"};
  return error;
}

io::Error VisitChecker::commit(const Plan& plan) {
  io::Error error = finish(plan, nullptr);
  if (!error && commits_ != 1)
    error = {.kind = io::ErrorKind::corruption,
             .operation = "check the plan",
             .detail = "it commits " + std::to_string(commits_) + " times"};
  return error;
}

void VisitChecker::drop(int unit) {
  ++sums_[unit].epoch;
  sums_[unit].visits = 0;
  sums_[unit].parts = 0;  // what is on the device of it is nobody's any more
  for (const Chunk& chunk : layout_.trainable_chunks_of(unit)) taken_[chunk.id] = 0;
}

void VisitChecker::changed(int unit) {
  for (const Chunk& chunk : layout_.chunks_of(unit)) {
    ++used_version_[chunk.id];
    rules_.changed(chunk.id);
  }
}

io::Error VisitChecker::finish(const Plan& plan, const VisitRequest* request) {
  request_ = request;
  computed_ = commits_ = 0;
  rules_.begin_plan();
  ledger_.begin_plan();
  ledger_.play(plan, [&](const Task& task) {
    if (task.kind == TaskKind::compute)
      compute(task, plan);
    else if (task.kind == TaskKind::commit)
      commit();
    else if (rules_.names_chunk(task))
      task.kind == TaskKind::update ? update(task) : move(task);
  });
  if (computed_ != (request == nullptr ? 0 : request->micro_batches))
    ledger_.wrong("computes " + std::to_string(computed_) + " micro-batches");
  for (int unit = 0; keeps_sums_ && unit < static_cast<int>(sums_.size()); ++unit) {
    Sum& sum = sums_[unit];
    const auto chunks = layout_.trainable_chunks_of(unit);
    const auto updated = static_cast<std::size_t>(
        std::count_if(chunks.begin(), chunks.end(), [&](const Chunk& chunk) { return rules_.updated(chunk.id) == 1; }));
    if (updated != 0 && updated != chunks.size()) ledger_.wrong("updates a part of unit " + std::to_string(unit));
    if (updated != 0) sum.owed.reset();
    const std::vector<int> none, &open = open_stage_ == -1 ? none : layout_.stages()[open_stage_].units;
    if (sum.parts == 0)
      expect_at_home(unit);
    else if (std::find(open.begin(), open.end(), unit) == open.end())
      ledger_.wrong("leaves a gradient of unit " + std::to_string(unit) + " on the device");
  }
  return ledger_.error();
}

// All that visits added is in the sum on the host, what is owed until it is applied.
void VisitChecker::expect_at_home(int unit) {
  const Sum& sum = sums_[unit];
  // A sum that follows one that is owed would overwrite it: its update comes first.
  const int epoch = sum.visits != 0 ? sum.epoch
                    : sum.owed      ? sum.owed->epoch
                                    : 0,
            visits = sum.visits != 0 ? sum.visits
                     : sum.owed      ? sum.owed->visits
                                     : 0;
  if (visits == 0) return;
  for (const Chunk& chunk : layout_.trainable_chunks_of(unit)) {
    const int id = chunk.id;
    if (ledger_.home(ExtentKind::gradient, id).content != Content{What::gradient, id, epoch, visits} ||
        (visits > 1 && ledger_.home(ExtentKind::gradient_low, id).content != Content{What::low, id, epoch, visits}))
      ledger_.wrong("the gradient of chunk " + std::to_string(id) + " is not where it belongs");
  }
}

void VisitChecker::compute(const Task& task, const Plan& plan) {
  if (task.micro_batch != computed_++) return ledger_.wrong("is not the next micro-batch's");
  if (request_ == nullptr || task.visit < 0 || task.visit >= static_cast<int>(plan.visits.size()))
    return ledger_.wrong("belongs to no visit");
  const Visit& visit = plan.visits[task.visit];
  if (visit.stage != request_->stage || visit.pass != request_->pass || task.stage != visit.stage ||
      task.pass != visit.pass)
    return ledger_.wrong("is not the visit asked for");
  const std::vector<int>& units = layout_.stages()[visit.stage].units;
  if (visit.needed != (need_ == nullptr ? std::vector<int>{} : need_->units) ||
      visit.weights.size() != units.size() + visit.needed.size())
    return ledger_.wrong("does not have the units that are needed");
  const bool adds = visit.pass == Pass::backward || visit.pass == Pass::head;
  for (std::size_t position = 0; position < visit.weights.size(); ++position) {
    const int unit = visit.unit(units, position);
    const bool own = position < units.size();
    if (visit.weights[position] == kNowhere) return ledger_.wrong("the visit has no weights");
    for (const Chunk& chunk : layout_.chunks_of(unit)) {
      const int id = chunk.id;
      ledger_.read_device(visit.weights[position] + chunk.word_place(), chunk.word_bytes(),
                          {What::words, id, used_version_[id]});
    }
    if (!adds || !(own ? request_->gradients[position] : need_->gradients[position - units.size()])) continue;
    const std::uint64_t begin = visit.gradients[position], bytes = layout_.gradient_bytes(unit);
    if (begin == kNowhere)
      return ledger_.wrong("the visit has no place for the gradient of unit " + std::to_string(unit));
    Sum& sum = sums_[unit];
    if (visit.fresh_gradient[position]) {
      if (sum.parts != 0) return ledger_.wrong("starts a gradient afresh while one has not left the device");
      ++sum.serial;
      ++sum.visits;
    } else {
      if (need_ == nullptr && !gradients_stayed_) return ledger_.wrong("adds to a gradient that was not to stay");
      ledger_.read_device(begin, bytes, {What::sum, unit, sum.serial, sum.parts});
    }
    ledger_.write_device(begin, bytes, {What::sum, unit, sum.serial, ++sum.parts});
  }
}

// Every update that was owed so far.
void VisitChecker::commit() {
  ++commits_;
  rules_.commit(used_version_);
}

void VisitChecker::move(const Task& task) {
  switch (task.kind) {
    case TaskKind::measure:
      return rules_.measure(task,
                            {What::gradient, task.chunk, sums_[layout_.chunks()[task.chunk].unit].epoch, /*parts=*/1});
    case TaskKind::download_gradient:
      return take_gradient(task);
    case TaskKind::accumulate:
      return accumulate(task);
    case TaskKind::read_gradient:
      return copy(ledger_.stored(ExtentKind::gradient, task.chunk), ledger_.host(task.gradient), "storage",
                  What::gradient, task.chunk);
    case TaskKind::write_gradient:
      if (ledger_.host(task.gradient).content.parts == 1 && rules_.measured(task.chunk) == 0)
        ledger_.wrong("the gradient has not been measured");
      return copy(ledger_.host(task.gradient), ledger_.stored(ExtentKind::gradient, task.chunk), "the host buffer",
                  What::gradient, task.chunk);
    case TaskKind::read_gradient_low:
      return copy(ledger_.stored(ExtentKind::gradient_low, task.chunk), ledger_.host(task.gradient_low), "storage",
                  What::low, task.chunk);
    case TaskKind::write_gradient_low:
      return copy(ledger_.host(task.gradient_low), ledger_.stored(ExtentKind::gradient_low, task.chunk),
                  "the host buffer", What::low, task.chunk);
    default:
      // Updates are the host's alone.
      if (task.kind == TaskKind::download_hi || task.kind == TaskKind::upload_state ||
          task.kind == TaskKind::download_state || !rules_.move(task))
        ledger_.wrong("is of no kind that a visit has");
  }
}

// Which sum it is of, whoever uses it will ask.
void VisitChecker::copy(Ledger::Held& from, Ledger::Held& to, const char* where, What what, int chunk) {
  const Content content = from.content;
  if (content.what != what || content.of != chunk) ledger_.wrong(std::string(where) + " does not hold what it needs");
  ledger_.read(from, content, where);
  ledger_.write(to, content);
}

void VisitChecker::take_gradient(const Task& task) {
  const Chunk& chunk = layout_.chunks()[task.chunk];
  Sum& sum = sums_[chunk.unit];
  if (taken_serial_[task.chunk] == sum.serial) return ledger_.wrong("takes a gradient for a second time");
  ledger_.read_device(task.device_offset, 2 * task.bytes, {What::sum, chunk.unit, sum.serial, sum.parts});
  taken_serial_[task.chunk] = sum.serial;
  const int visits = ++taken_[task.chunk];
  ledger_.write(ledger_.host(task.gradient),
                {visits == 1 ? What::gradient : What::incoming, task.chunk, sum.epoch, visits});
  const auto chunks = layout_.trainable_chunks_of(chunk.unit);
  if (std::all_of(chunks.begin(), chunks.end(),
                  [&](const Chunk& other) { return taken_serial_[other.id] == sum.serial; }))
    sum.parts = 0;
}

void VisitChecker::accumulate(const Task& task) {
  const int visits = taken_[task.chunk], epoch = sums_[layout_.chunks()[task.chunk].unit].epoch;
  if (task.first_sum != (visits == 2)) return ledger_.wrong("takes a bf16 gradient for a sum, or a sum for one");
  ledger_.read(ledger_.host(task.incoming), {What::incoming, task.chunk, epoch, visits}, "the gradient to add");
  ledger_.read(ledger_.host(task.gradient), {What::gradient, task.chunk, epoch, visits - 1}, "the sum");
  if (!task.first_sum)
    ledger_.read(ledger_.host(task.gradient_low), {What::low, task.chunk, epoch, visits - 1}, "its low words");
  ledger_.write(ledger_.host(task.gradient), {What::gradient, task.chunk, epoch, visits});
  ledger_.write(ledger_.host(task.gradient_low), {What::low, task.chunk, epoch, visits});
}

void VisitChecker::update(const Task& task) {
  const Sum& sum = sums_[layout_.chunks()[task.chunk].unit];
  if (!sum.owed || rules_.updated(task.chunk) != 0) return ledger_.wrong("no update is owed");
  Ledger::Held& gradient = ledger_.host(task.gradient);
  ledger_.read(gradient, {What::gradient, task.chunk, sum.owed->epoch, sum.owed->visits}, "the gradient");
  if ((sum.owed->visits > 1) != (task.gradient_low.where != HostRef::Where::none))
    return ledger_.wrong("takes a bf16 gradient for a sum, or a sum for one");
  if (sum.owed->visits > 1) {
    ledger_.read(ledger_.host(task.gradient_low), {What::low, task.chunk, sum.owed->epoch, sum.owed->visits},
                 "its low words");
    ledger_.write(gradient, {});  // rounded in place
  }
  rules_.update(task);
}

}  // namespace tierflow::swap

#include "swap/simulator.h"

#include <algorithm>
#include <utility>

namespace tierflow::swap {

namespace {

double at_rate(double amount, double rate) {
  return rate > 0 ? amount / rate : 0.0;
}

}  // namespace

Simulator::Simulator(const Layout& layout, std::vector<bool> deferred, Rates rates)
    : layout_(layout), deferred_(std::move(deferred)), rates_(std::move(rates)) {
  for (const Chunk& chunk : layout.chunks()) {
    const auto rate = [&](const std::map<std::string, double>& rates) {
      const auto found = rates.find(layout.units()[chunk.unit].groups[chunk.group].precision);
      return found == rates.end() ? 0 : found->second;
    };
    update_rates_.push_back(rate(rates_.update));
    device_rates_.push_back(rate(rates_.device_update));
  }
}

void Simulator::append(const Plan& plan) {
  forget_finished();
  if (done_.empty()) base_ = plan.first_id;
  TaskId id = plan.first_id;
  for (const Task& task : plan.tasks) {
    Queue& queue = lanes_[static_cast<int>(task.lane)];
    int& open = queue.tasks.emplace_back(Waiting{.work = {id, phases(task, plan)}}).dependencies;
    for (const TaskId dependency : task.dependencies) {
      if (done(dependency)) continue;
      queue.dependencies.push_back(dependency);
      ++open;
    }
    if (records_tasks_) {
      if (open_records_.empty()) first_recorded_ = id;
      open_records_.push_back({.id = id,
                               .kind = task.kind,
                               .lane = task.lane,
                               .pass = task.pass,
                               .stage = task.stage,
                               .micro_batch = task.micro_batch,
                               .chunk = task.chunk,
                               .bytes = task.bytes,
                               .dependencies = task.dependencies});
    }
    done_.push_back(0);
    ++unfinished_;
    if (task.lane == Lane::update) ++unfinished_updates_;
    ++id;
  }
}

void Simulator::forget_finished() {
  const auto drop = [](auto& list, std::size_t count) {
    list.erase(list.begin(), list.begin() + static_cast<std::ptrdiff_t>(std::min(count, list.size())));
  };
  for (Queue& queue : lanes_) {
    drop(queue.tasks, std::exchange(queue.next_task, 0));
    drop(queue.dependencies, std::exchange(queue.next_dependency, 0));
  }
  base_ += finished_;
  drop(done_, std::exchange(finished_, 0));
  if (base_ <= first_recorded_) return;
  drop(open_records_, base_ - first_recorded_);
  first_recorded_ = base_;
}

double Simulator::compute_seconds(const Task& task, const Plan& plan) const {
  const StageSeconds& stage = rates_.stages[task.stage];
  const auto by_activations = [&](double recompute, double keep, double swap) {
    return task.activations == Activations::keep ? keep : task.activations == Activations::swap ? swap : recompute;
  };
  double seconds =
      task.pass == Pass::forward    ? by_activations(stage.forward, stage.forward_keeping, stage.forward_swapping)
      : task.pass == Pass::backward ? by_activations(stage.backward, stage.backward_kept, stage.backward_swapped)
      : task.pass == Pass::head     ? stage.head
                                    : stage.evaluate;
  if (task.micro_batch != 0) return seconds;
  const Visit& visit = plan.visits[task.visit];
  const auto& units = layout_.stages()[task.stage].units;
  for (std::size_t position = 0; position < visit.fresh_gradient.size(); ++position)
    if (visit.fresh_gradient[position])
      seconds += at_rate(static_cast<double>(layout_.gradient_bytes(units[position])), rates_.machine.fill);
  return seconds;
}

// What is read also has to be verified: that is the second phase, by another server.
Simulator::Phases Simulator::phases(const Task& task, const Plan& plan) const {
  const MachineRates& machine = rates_.machine;
  const auto bytes = static_cast<double>(task.bytes), elements = bytes / 2;
  const double copying = machine.compute_on_cores ? 1 : 0;
  switch (task.lane) {
    case Lane::disk_read:
      return {{at_rate(bytes, machine.disk_read)}, {at_rate(bytes, machine.checksum), 1}};
    case Lane::disk_write:
      return {{at_rate(bytes, machine.disk_write)}};
    case Lane::upload:
      return {{at_rate(bytes, machine.upload), copying}};
    case Lane::download: {
      Phases both{{task.kind == TaskKind::download_gradient ? at_rate(elements, machine.cast)
                                                            : at_rate(bytes, machine.download),
                   copying}};
      if (task.words.where == HostRef::Where::activation_buffer ||
          (task.updated &&
           (task.words.where == HostRef::Where::word_buffer || task.state.where == HostRef::Where::state_buffer)))
        both.push_back({at_rate(bytes, machine.checksum), 1});
      return both;
    }
    case Lane::compute:
      return {{compute_seconds(task, plan), machine.compute_on_cores ? static_cast<double>(machine.threads) : 0}};
    case Lane::commit:
      return {{0}};
    case Lane::update:
      break;
  }
  if (task.kind == TaskKind::update_on_device)
    return {{at_rate(elements, device_rates_[task.chunk]),
             machine.compute_on_cores ? static_cast<double>(machine.threads) : 0}};
  const bool updates = task.kind == TaskKind::update;
  double seconds = updates ? at_rate(elements, update_rates_[task.chunk]) : 0, stamped = 0;
  if (!updates || !deferred_[task.chunk]) seconds += at_rate(elements, machine.measure);
  if (updates && task.words.where == HostRef::Where::word_buffer) stamped += bytes;
  if (updates && task.state.where == HostRef::Where::state_buffer)
    stamped += static_cast<double>(layout_.chunks()[task.chunk].state_bytes);
  if (!updates && task.gradient.where == HostRef::Where::word_buffer) stamped += bytes;
  Phases both{{seconds, static_cast<double>(machine.threads)}};
  if (stamped > 0) both.push_back({at_rate(stamped, machine.checksum), 1});
  return both;
}

double Simulator::disk_speed(Server server) const {
  const MachineRates& machine = rates_.machine;
  if (servers_[server == kRead ? kWrite : kRead].empty()) return 1.0;
  if (machine.disk_mixed <= 0 || machine.disk_read <= 0 || machine.disk_write <= 0) return 0.5;
  return std::min(1.0, 0.25 * machine.disk_mixed * (1 / machine.disk_read + 1 / machine.disk_write));
}

// The speed of work that takes cores: each gets the same share of what it wants.
double Simulator::core_share() const {
  double wanted = 0;
  for (int server = kVerify; server < kServers; ++server)
    if (!servers_[server].empty()) wanted += servers_[server].front().phases.front().cores;
  return std::min(1.0, rates_.machine.cores / wanted);
}

// Lets every lane begin what it may: its next task, once nothing of the lane runs (disks take the next at once).
void Simulator::start() {
  constexpr Server kServerOf[kLanes] = {kRead, kWrite, kUpload, kDownload, kCompute, kUpdate, kCommit};
  for (int lane = 0; lane < kLanes; ++lane) {
    const Server server = kServerOf[lane];
    const bool queues = server == kRead || server == kWrite;
    Queue& waiting = lanes_[lane];
    while ((queues || servers_[server].empty()) && may_begin(waiting)) {
      const Work& next = waiting.tasks[waiting.next_task++].work;
      if (TaskRecord* record = record_of(next.id)) record->begin = now_;
      servers_[server].push_back(next);
    }
  }
}

bool Simulator::may_begin(Queue& queue) const {
  if (queue.next_task == queue.tasks.size()) return false;
  int& open = queue.tasks[queue.next_task].dependencies;
  while (open > 0 && done(queue.dependencies[queue.next_dependency])) {
    ++queue.next_dependency;
    --open;
  }
  return open == 0;
}

void Simulator::finish(TaskId id) {
  done_[id - base_] = 1;
  --unfinished_;
  if (TaskRecord* record = record_of(id)) {
    record->end = now_;
    records_.push_back(std::move(*record));
  }
  while (finished_ < done_.size() && done_[finished_] != 0) ++finished_;
}

void Simulator::play(const std::size_t& remaining, double until) {
  while (remaining != 0 && now_ <= until) {
    start();
    const double share = core_share();
    double speeds[kServers] = {}, step = -1;
    for (int server = 0; server < kServers; ++server) {
      if (servers_[server].empty()) continue;
      const Phase& phase = servers_[server].front().phases.front();
      const bool disk = server == kRead || server == kWrite;
      speeds[server] = disk ? disk_speed(static_cast<Server>(server)) : phase.cores == 0 ? 1.0 : share;
      const double needed = phase.seconds / speeds[server];
      if (step < 0 || needed < step) step = needed;
    }
    if (step < 0) return;  // nothing runs and nothing can start: the plan has no more
    now_ += step;
    for (int server = 0; server < kServers; ++server) {
      if (servers_[server].empty()) continue;
      Work& work = servers_[server].front();
      work.phases.front().seconds -= step * speeds[server];
      if (work.phases.front().seconds > 1e-12) continue;
      work.phases.pop_front();
      if (!work.phases.empty() && server != kRead) continue;
      Work done = std::move(work);
      servers_[server].pop_front();
      if (server == kRead)
        servers_[kVerify].push_back(std::move(done));
      else
        finish(done.id);
      if (server == kUpdate) --unfinished_updates_;
    }
  }
}

bool Simulator::finish_updates(double until) {
  play(unfinished_updates_, until);
  return now_ <= until;
}

void Simulator::drain() {
  play(unfinished_, std::numeric_limits<double>::infinity());
}

std::vector<TaskRecord> Simulator::take_records() {
  return std::exchange(records_, {});
}

}  // namespace tierflow::swap

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

void Simulator::append(Plan plan) {
  if (nodes_.empty()) base_ = plan.first_id;
  TaskId id = plan.first_id;
  for (Task& task : plan.tasks) {
    Node& added = nodes_.emplace_back();
    Detail& more = details_.emplace_back();
    more.record = {.id = id,
                   .kind = task.kind,
                   .lane = task.lane,
                   .pass = task.pass,
                   .stage = task.stage,
                   .micro_batch = task.micro_batch,
                   .chunk = task.chunk,
                   .bytes = task.bytes};
    more.phases = phases(task, plan);
    added.updates = task.lane == Lane::update;
    for (TaskId dependency : task.dependencies) {
      if (dependency < base_ || node(dependency).done) continue;
      add_dependent(node(dependency), id);
      ++added.waiting;
    }
    more.record.dependencies = std::move(task.dependencies);
    lanes_[static_cast<int>(task.lane)].push_back(id);
    ++unfinished_;
    if (added.updates) ++unfinished_updates_;
    ++id;
  }
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

double Simulator::speed(Server server) const {
  const MachineRates& machine = rates_.machine;
  if (server == kRead || server == kWrite) {
    if (servers_[server == kRead ? kWrite : kRead].empty()) return 1.0;
    if (machine.disk_mixed <= 0 || machine.disk_read <= 0 || machine.disk_write <= 0) return 0.5;
    return std::min(1.0, 0.25 * machine.disk_mixed * (1 / machine.disk_read + 1 / machine.disk_write));
  }
  const double own = servers_[server].front().phases.front().cores;
  if (own == 0) return 1.0;
  double wanted = 0;
  for (int other = kVerify; other < kServers; ++other)
    if (!servers_[other].empty()) wanted += servers_[other].front().phases.front().cores;
  return std::min(1.0, machine.cores / wanted);
}

// Lets every lane begin what it may: its next task, once nothing of the lane runs (disks take the next at once).
void Simulator::start() {
  constexpr Server kServerOf[kLanes] = {kRead, kWrite, kUpload, kDownload, kCompute, kUpdate, kCommit};
  for (int lane = 0; lane < kLanes; ++lane) {
    const Server server = kServerOf[lane];
    const bool queues = server == kRead || server == kWrite;
    auto& waiting = lanes_[lane];
    while (!waiting.empty() && node(waiting.front()).waiting == 0 && (queues || servers_[server].empty())) {
      Detail& next = detail(waiting.front());
      next.record.begin = now_;
      servers_[server].push_back({waiting.front(), next.phases});
      waiting.pop_front();
    }
  }
}

void Simulator::add_dependent(Node& node, TaskId id) {
  int place = free_dependents_;
  if (place == kNone) {
    place = static_cast<int>(dependents_.size());
    dependents_.emplace_back();
  } else {
    free_dependents_ = dependents_[place].next;
  }
  dependents_[place] = {id, std::exchange(node.dependents, place)};
}

void Simulator::finish(TaskId id) {
  Node& at = node(id);
  detail(id).record.end = now_;
  at.done = true;
  --unfinished_;
  if (at.updates) --unfinished_updates_;
  if (at.dependents != kNone) {
    int last = at.dependents;
    for (;; last = dependents_[last].next) {
      --node(dependents_[last].id).waiting;
      if (dependents_[last].next == kNone) break;
    }
    dependents_[last].next = std::exchange(free_dependents_, std::exchange(at.dependents, kNone));
  }
  records_.push_back(std::move(detail(id).record));
  while (!nodes_.empty() && nodes_.front().done) {
    nodes_.pop_front();
    details_.pop_front();
    ++base_;
  }
}

void Simulator::play(const std::size_t& remaining) {
  while (remaining != 0) {
    start();
    double speeds[kServers] = {}, step = -1;
    for (int server = 0; server < kServers; ++server) {
      if (servers_[server].empty()) continue;
      speeds[server] = speed(static_cast<Server>(server));
      const double needed = servers_[server].front().phases.front().seconds / speeds[server];
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
    }
  }
}

void Simulator::finish_updates() {
  play(unfinished_updates_);
}

void Simulator::drain() {
  play(unfinished_);
}

std::vector<TaskRecord> Simulator::take_records() {
  return std::exchange(records_, {});
}

}  // namespace tierflow::swap

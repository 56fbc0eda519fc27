#include "swap/simulator.h"

#include <algorithm>
#include <utility>

namespace tierflow::swap {

Simulator::Simulator(Rates rates) : rates_(std::move(rates)) {}

void Simulator::append(const Plan& plan) {
  if (nodes_.empty()) base_ = plan.first_id;
  TaskId id = plan.first_id;
  for (const Task& task : plan.tasks) {
    Node& added = nodes_.emplace_back();
    added.record = {.id = id,
                    .kind = task.kind,
                    .lane = task.lane,
                    .pass = task.pass,
                    .stage = task.stage,
                    .micro_batch = task.micro_batch,
                    .chunk = task.chunk,
                    .bytes = task.bytes,
                    .dependencies = task.dependencies};
    added.updates = task.lane == Lane::update;
    for (TaskId dependency : task.dependencies) {
      if (dependency < base_ || node(dependency).done) continue;
      node(dependency).dependents.push_back(id);
      ++added.waiting;
    }
    lanes_[static_cast<int>(task.lane)].push_back(id);
    ++unfinished_;
    if (added.updates) ++unfinished_updates_;
    ++id;
  }
}

double Simulator::seconds(Server server, const TaskRecord& task) const {
  const MachineRates& machine = rates_.machine;
  const auto bytes = static_cast<double>(task.bytes);
  const auto at = [](double amount, double rate) { return rate > 0 ? amount / rate : 0.0; };
  switch (server) {
    case kRead:
      return at(bytes, machine.disk_read);
    case kWrite:
      return at(bytes, machine.disk_write);
    case kVerify:
      return at(bytes, machine.checksum);
    case kUpload:
      return at(bytes, machine.upload);
    case kDownload:
      return at(task.kind == TaskKind::download_gradient ? 2 * bytes : bytes, machine.download);
    case kUpdate:
      return at(bytes / 2, task.kind == TaskKind::measure ? machine.measure : machine.update);
    default:
      break;
  }
  const StageSeconds& stage = rates_.stages[task.stage];
  switch (task.pass) {
    case Pass::forward:
      return stage.forward;
    case Pass::backward:
      return stage.backward;
    case Pass::head:
      return stage.head;
    default:
      return stage.evaluate;
  }
}

double Simulator::cores_wanted(Server server) const {
  switch (server) {
    case kUpdate:
      return rates_.machine.cores;
    case kVerify:
      return 1;
    case kCompute:
      return rates_.machine.compute_on_cores ? rates_.machine.cores : 0;
    case kUpload:
    case kDownload:
      return rates_.machine.compute_on_cores ? 1 : 0;
    default:
      return 0;
  }
}

double Simulator::speed(Server server) const {
  if (server == kRead) return servers_[kWrite].empty() ? 1.0 : 0.5;
  if (server == kWrite) return servers_[kRead].empty() ? 1.0 : 0.5;
  if (cores_wanted(server) == 0) return 1.0;
  double wanted = 0;
  for (int other = 0; other < kServers; ++other)
    if (!servers_[other].empty()) wanted += cores_wanted(static_cast<Server>(other));
  return std::min(1.0, rates_.machine.cores / wanted);
}

// Lets every lane begin what it may: its next task, once nothing of the lane runs (disks take the next at once).
void Simulator::start() {
  constexpr Server kServerOf[kLanes] = {kRead, kWrite, kUpload, kDownload, kCompute, kUpdate};
  for (int lane = 0; lane < kLanes; ++lane) {
    const Server server = kServerOf[lane];
    const bool queues = server == kRead || server == kWrite;
    auto& waiting = lanes_[lane];
    while (!waiting.empty() && node(waiting.front()).waiting == 0 && (queues || servers_[server].empty())) {
      Node& next = node(waiting.front());
      next.record.begin = now_;
      servers_[server].push_back({waiting.front(), seconds(server, next.record)});
      waiting.pop_front();
    }
  }
}

void Simulator::finish(TaskId id) {
  Node& at = node(id);
  at.record.end = now_;
  at.done = true;
  --unfinished_;
  if (at.updates) --unfinished_updates_;
  for (TaskId dependent : at.dependents) --node(dependent).waiting;
  records_.push_back(std::move(at.record));
  while (!nodes_.empty() && nodes_.front().done) {
    nodes_.pop_front();
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
      const double needed = servers_[server].front().left / speeds[server];
      if (step < 0 || needed < step) step = needed;
    }
    if (step < 0) return;  // nothing runs and nothing can start: the plan has no more
    now_ += step;
    for (int server = 0; server < kServers; ++server) {
      if (servers_[server].empty()) continue;
      Work& work = servers_[server].front();
      work.left -= step * speeds[server];
      if (work.left > 1e-12) continue;
      const TaskId id = work.id;
      servers_[server].pop_front();
      if (server == kRead)
        servers_[kVerify].push_back({id, seconds(kVerify, node(id).record)});
      else
        finish(id);
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

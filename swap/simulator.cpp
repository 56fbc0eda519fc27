#include "swap/simulator.h"

#include <algorithm>
#include <utility>

namespace tierflow::swap {

namespace {

constexpr Lane kLaneOf[] = {Lane::disk_read, Lane::disk_write, Lane::disk_read, Lane::upload, Lane::download,
                            Lane::download,  Lane::compute,    Lane::update,    Lane::commit};  // by Server

double at_rate(double amount, double rate) {
  return rate > 0 ? amount / rate : 0.0;
}

}  // namespace

double both_directions(const MachineRates& machine) {
  if (machine.disk_mixed <= 0 || machine.disk_read <= 0 || machine.disk_write <= 0) return 0.5;
  return std::min(1.0, 0.25 * machine.disk_mixed * (1 / machine.disk_read + 1 / machine.disk_write));
}

double drive_seconds(const MachineRates& machine, double read_bytes, double write_bytes) {
  const auto [less, more] =
      std::minmax({at_rate(read_bytes, machine.disk_read), at_rate(write_bytes, machine.disk_write)});
  return more + less * (std::min(2.0, 1 / both_directions(machine)) - 1);
}

Simulator::Simulator(const Layout& layout, Rates rates) : layout_(layout), rates_(std::move(rates)) {
  restart();
  both_disks_ = both_directions(rates_.machine);
  for (const Chunk& chunk : layout.chunks()) {
    const auto rate = [&](const std::map<std::string, double>& rates) {
      const auto found = rates.find(layout.units()[chunk.unit].groups[chunk.group].precision);
      return found == rates.end() ? 0 : found->second;
    };
    update_rates_.push_back(rate(rates_.update));
    device_rates_.push_back(rate(rates_.device_update));
  }
}

void Simulator::restart() {
  now_ = computing_ = 0;
  finished_ = unfinished_ = unfinished_updates_ = 0;
  done_.clear();
  for (Queue& queue : lanes_) {
    queue.tasks.clear();
    queue.dependencies.clear();
    queue.begun = queue.next_dependency = 0;
  }
  for (int server = 0; server < kServers; ++server) {
    next_[server] = 0;
    work_on(static_cast<Server>(server), kIdle, 0);
  }
  records_tasks_ = true;
  open_records_.clear();
  records_.clear();
}

void Simulator::append(const Plan& plan) {
  forget_finished();
  if (done_.empty()) base_ = plan.first_id;
  TaskId id = plan.first_id;
  for (const Task& task : plan.tasks) {
    Queue& queue = lanes_[static_cast<int>(task.lane)];
    Waiting& waiting = queue.tasks.emplace_back();
    waiting.id = id;
    waiting.work = work_of(task, plan);
    for (const TaskId dependency : task.dependencies) {
      if (done(dependency)) continue;
      queue.dependencies.push_back(dependency);
      ++waiting.dependencies;
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
  for (int each = 0; each < kServers; ++each) {
    const auto server = static_cast<Server>(each), second = second_of(server);
    if (is_second(server)) continue;
    Queue& queue = lanes_[static_cast<int>(kLaneOf[server])];
    const std::size_t done = next_[second == kServers ? server : second];
    next_[server] -= done;
    if (second != kServers) next_[second] = 0;
    drop(queue.tasks, done);
    queue.begun -= done;
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

// What is read also has to be verified, and some of what is downloaded stamped: that follows, by another server.
Simulator::Work Simulator::work_of(const Task& task, const Plan& plan) const {
  using Where = HostRef::Where;
  const MachineRates& machine = rates_.machine;
  const auto bytes = static_cast<double>(task.bytes), elements = bytes / 2;
  const double threads = machine.threads, copying = machine.compute_on_cores ? 1 : 0, computing = copying * threads;
  switch (task.lane) {
    case Lane::disk_read:
      return {at_rate(bytes, machine.disk_read), 0, at_rate(bytes, machine.checksum), bytes};
    case Lane::disk_write:
      return {at_rate(bytes, machine.disk_write), 0, -1, bytes};
    case Lane::upload:
      return {at_rate(bytes, machine.upload), copying, -1, bytes};
    case Lane::download: {
      const bool stamped =
          task.words.where == Where::activation_buffer ||
          (task.updated && (task.words.where == Where::word_buffer || task.state.where == Where::state_buffer));
      return {
          task.kind == TaskKind::download_gradient ? at_rate(elements, machine.cast) : at_rate(bytes, machine.download),
          copying, stamped ? at_rate(bytes, machine.checksum) : 0, bytes};
    }
    case Lane::compute:
      return {compute_seconds(task, plan), computing};
    case Lane::commit:
      return {};
    case Lane::update:
      break;
  }
  if (task.kind == TaskKind::update_on_device || task.kind == TaskKind::keep_gradient)
    return {at_rate(elements, device_rates_[task.chunk]), computing};
  const bool updates = task.kind == TaskKind::update || task.kind == TaskKind::catch_up;
  double seconds = updates ? at_rate(elements, update_rates_[task.chunk]) : 0, stamped = 0;
  if ((!updates || task.measures) && !task.found) seconds += at_rate(elements, machine.measure);
  if (updates && task.words.where == Where::word_buffer) stamped += bytes;
  if (updates && task.state.where == Where::state_buffer)
    stamped += static_cast<double>(layout_.chunks()[task.chunk].state_bytes);
  if (!updates && task.gradient.where == Where::word_buffer) stamped += bytes;
  // An update reads the gradient, and reads and writes words and state; a measurement reads the gradient.
  const double moved = updates ? bytes + 2 * (bytes + static_cast<double>(layout_.chunks()[task.chunk].state_bytes))
                       : task.found ? 0.0
                                    : bytes;
  return {seconds, threads, stamped > 0 ? at_rate(stamped, machine.checksum) : -1, moved};
}

// Lets every lane begin what it may: its next task, once nothing of the lane runs (disks take the next at once).
void Simulator::start() {
  for (int each = 0; each < kServers; ++each) {
    const auto server = static_cast<Server>(each);
    if (is_second(server)) continue;
    const bool queues = server == kRead || server == kWrite;
    Queue& waiting = lanes_[static_cast<int>(kLaneOf[server])];
    while ((queues || idle(server)) && may_begin(waiting)) {
      if (TaskRecord* record = record_of(waiting.tasks[waiting.begun].id)) record->begin = now_;
      ++waiting.begun;
      if (idle(server)) take_next(server);
    }
  }
}

bool Simulator::may_begin(Queue& queue) const {
  if (queue.begun == queue.tasks.size()) return false;
  int& open = queue.tasks[queue.begun].dependencies;
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
    if (records_.empty()) records_.reserve(open_records_.size());
    records_.push_back(std::move(*record));
  }
  while (finished_ < done_.size() && done_[finished_] != 0) ++finished_;
}

// Begins with its next task, if that has begun and, where another one comes first, was left by that one.
void Simulator::take_next(Server server) {
  const Queue& queue = lanes_[static_cast<int>(kLaneOf[server])];
  const bool second = is_second(server);
  follows_[server] = second;
  if (next_[server] == (second ? next_[first_of(server)] : queue.begun)) return work_on(server, kIdle, 0);
  const Work& work = queue.tasks[next_[server]].work;
  if (second) return work_on(server, work.then, 1, work.then * rates_.machine.checksum);
  work_on(server, work.seconds, work.cores, work.moved);
}

void Simulator::work_on(Server server, double seconds, double cores, double moved) {
  left_[server] = seconds;
  cores_[server] = cores;
  memory_[server] = at_rate(moved, seconds);
}

void Simulator::end_work(Server server) {
  const Waiting& task = lanes_[static_cast<int>(kLaneOf[server])].tasks[next_[server]];
  const Server second = second_of(server);
  if (second == kServers && task.work.then >= 0 && !std::exchange(follows_[server], true))
    return work_on(server, task.work.then, 1, task.work.then * rates_.machine.checksum);
  ++next_[server];
  if (second == kServers) {
    finish(task.id);
  } else if (idle(second)) {
    take_next(second);
    if (left_[second] <= 0) end_work(second);
  }
  if (server == kUpdate) --unfinished_updates_;
  take_next(server);
}

// Work that takes cores, or moves bytes in host memory, gets the same share of what it wants as any other.
void Simulator::play(const std::size_t& remaining, double until) {
  while (remaining != 0 && now_ <= until) {
    start();
    const auto share_of = [](double there_is, const double(&wanted)[kServers]) {
      double all = 0;
      for (const double each : wanted) all += each;
      return there_is > 0 && all > there_is ? there_is / all : 1.0;
    };
    const double share = share_of(rates_.machine.cores, cores_), memory = share_of(rates_.machine.memory, memory_);
    const double disk = idle(kRead) || idle(kWrite) ? 1.0 : both_disks_;
    double speeds[kServers], step = kIdle;
    for (int server = 0; server < kServers; ++server) speeds[server] = cores_[server] == 0 ? 1.0 : share;
    speeds[kRead] = speeds[kWrite] = disk;
    for (int server = 0; server < kServers; ++server) {
      if (memory_[server] > 0) speeds[server] = std::min(speeds[server], memory);
      if (!idle(static_cast<Server>(server))) step = std::min(step, left_[server] / speeds[server]);
    }
    if (step == kIdle) return;  // nothing runs and nothing can start: the plan has no more
    now_ += step;
    if (!idle(kCompute)) computing_ += step;
    for (int server = 0; server < kServers; ++server) left_[server] -= step * speeds[server];
    for (int server = 0; server < kServers; ++server)
      if (left_[server] <= 1e-12) end_work(static_cast<Server>(server));
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

#include "runtime/models/key_value_store.h"

#include <algorithm>
#include <chrono>

#include "runtime/base/exception.h"
#include "runtime/base/seconds.h"

namespace tierflow {

KeyValueStore::KeyValueStore(std::unique_ptr<io::Volume> volume, const CacheShape& shape,
                             const CachePlacement& placement)
    : shape_(shape), placement_(placement), begins_(shape.in_ram.size()), volume_(std::move(volume)) {
  std::uint64_t at = 0;
  for (std::size_t stage = 0; stage < begins_.size(); ++stage) {
    begins_[stage] = at;
    if (placement_.stored[stage]) at += static_cast<std::uint64_t>(shape_.sequences) * shape_.piece(stage);
  }
  const auto count = static_cast<std::size_t>(placement_.buffers);
  auto memory = std::make_shared<io::Buffer>(io::allocate_buffer(count * placement_.of_buffer));
  if (!*memory)
    throw Exception(io::ErrorKind::memory,
                    "the system has no memory for buffers of keys and values: use a smaller "
                    "--host-memory or --batch");
  volume_->register_memory(memory->bytes());
  memory_ = std::move(memory);
  for (std::size_t buffer = count; buffer-- > 0;) free_.push_back(buffer);
}

KeyValueStore::~KeyValueStore() = default;

CacheTraffic KeyValueStore::traffic() const {
  const std::lock_guard lock(mutex_);
  return traffic_;
}

void KeyValueStore::clear() {
  std::unique_lock lock(mutex_);
  changed_.wait(
      lock, [&] { return std::ranges::all_of(held_, [](const auto& entry) { return entry.second.in_flight == 0; }); });
  for (const auto& [key, held] : held_) free_.push_back(held.buffer);
  held_.clear();
  order_.clear();
  next_taken_ = next_fetched_ = 0;
}

void KeyValueStore::expect(std::vector<Visit> order) {
  order_ = std::move(order);
  next_taken_ = next_fetched_ = 0;
  {
    const std::lock_guard lock(mutex_);
    std::vector<Key> left;  // of an order that was not followed
    for (auto& [key, held] : held_)
      if (std::exchange(held.expected, false)) left.push_back(key);
    for (const Key& key : left) let_go(key);
  }
  fetch_ahead();
}

// Each slab is a request, or where whole slabs move all of them are one.
void KeyValueStore::move(io::Op op, const Key& key, Part part) {
  if (part.begin >= part.end) return;
  const auto stage = static_cast<std::size_t>(key.first);
  const std::uint64_t slab = shape_.of_slab[stage], piece = shape_.piece(stage),
                      begin = begins_[stage] + static_cast<std::uint64_t>(key.second) * piece;
  const bool whole = part.begin == 0 && part.end == slab;
  const std::uint64_t requests = whole ? 1 : shape_.slabs, length = whole ? piece : part.end - part.begin;
  std::byte* memory = nullptr;
  {
    const std::lock_guard lock(mutex_);
    Held& held = held_.at(key);
    held.in_flight += static_cast<int>(requests);
    memory = memory_->data() + held.buffer * placement_.of_buffer;
    (op == io::Op::read ? traffic_.read : traffic_.written) += requests * length;
  }
  for (std::uint64_t request = 0; request < requests; ++request) {
    const std::uint64_t at = request * slab + part.begin;
    volume_->submit({.op = op,
                     .offset = begin + at,
                     .length = length,
                     .buffer = io::part_of(memory_, {memory + at, static_cast<std::size_t>(length)})},
                    [this, key](io::Completion&& done) { arrived(key, std::move(done)); });
  }
}

void KeyValueStore::arrived(const Key& key, io::Completion&& done) {
  const std::lock_guard lock(mutex_);
  if (done.error && !failed_) failed_ = done.error;
  --held_.at(key).in_flight;
  let_go(key);
  changed_.notify_all();
}

void KeyValueStore::let_go(const Key& key) {
  const auto found = held_.find(key);
  const Held& held = found->second;
  if (held.in_flight != 0 || held.taken || held.expected) return;
  free_.push_back(held.buffer);
  held_.erase(found);
}

// The mutex is not held. What is on its way back stays: it is newer than what the drive has.
void KeyValueStore::fetch_ahead() {
  for (; next_fetched_ < order_.size(); ++next_fetched_) {
    const Visit& visit = order_[next_fetched_];
    const Key key{visit.stage, visit.sequence};
    {
      const std::lock_guard lock(mutex_);
      if (const auto found = held_.find(key); found != held_.end()) {
        if (found->second.taken) return;
        found->second.expected = true;
        continue;
      }
      if (free_.empty() || failed_) return;
      held_[key] = {.buffer = free_.back(), .expected = true};
      free_.pop_back();
    }
    move(io::Op::read, key, visit.part);
  }
}

// There is one, or there will be: no more than most_taken() are taken.
std::size_t KeyValueStore::free_buffer(std::unique_lock<std::mutex>& lock) {
  for (;;) {
    if (!free_.empty()) {
      const std::size_t buffer = free_.back();
      free_.pop_back();
      return buffer;
    }
    const auto going =
        std::ranges::find_if(held_, [](const auto& entry) { return !entry.second.taken && !entry.second.expected; });
    if (going == held_.end()) {  // what came ahead has to give way
      const auto ahead = std::ranges::find_if(held_, [](const auto& entry) { return !entry.second.taken; });
      if (ahead == held_.end()) throw Exception(io::ErrorKind::internal, "all buffers of keys and values are taken");
      ahead->second.expected = false;
      next_fetched_ = next_taken_;
      let_go(ahead->first);
      continue;
    }
    changed_.wait(lock, [&] { return !free_.empty(); });
  }
}

void KeyValueStore::wait_for(std::unique_lock<std::mutex>& lock, const Key& key) {
  changed_.wait(lock, [&] { return held_.at(key).in_flight == 0; });
}

std::byte* KeyValueStore::take(const Visit& visit) {
  if (visit.sequence >= shape_.sequences)
    fail_usage("more sequences are generated at once than SessionOptions::cache has");
  const Key key{visit.stage, visit.sequence};
  const auto began = std::chrono::steady_clock::now();
  std::unique_lock lock(mutex_);
  if (const auto found = held_.find(key); found != held_.end()) {
    found->second.taken = true;
    found->second.expected = false;
  } else {
    const std::size_t buffer = free_buffer(lock);
    held_[key] = {.buffer = buffer, .taken = true};
    lock.unlock();
    move(io::Op::read, key, visit.part);
    lock.lock();
  }
  wait_for(lock, key);
  traffic_.waited += seconds_since(began);
  if (failed_) {
    io::Error error = failed_;
    error.detail += " (keys and values on storage)";
    throw Exception(std::move(error));
  }
  std::byte* memory = memory_->data() + held_.at(key).buffer * placement_.of_buffer;
  lock.unlock();
  if (next_taken_ < order_.size() && order_[next_taken_].stage == visit.stage &&
      order_[next_taken_].sequence == visit.sequence)
    next_fetched_ = std::max(next_fetched_, ++next_taken_);
  fetch_ahead();
  return memory;
}

void KeyValueStore::put_back(int stage, std::int64_t sequence, Part changed) {
  const Key key{stage, sequence};
  move(io::Op::write, key, changed);
  {
    const std::lock_guard lock(mutex_);
    held_.at(key).taken = false;
    let_go(key);
  }
  fetch_ahead();
}

}  // namespace tierflow

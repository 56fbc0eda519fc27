#pragma once
// A kernel that misbehaves on request: stands between an engine and the real backend and fails, shortens, delays,
// keeps, reorders or spoils chosen operations. Faults are set while the volume runs; counting starts when a fault is
// set.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "io/backend.h"
#include "io/volume.h"

namespace tierflow::testing {

struct Fault {
  enum class Kind {
    error,  // the operation fails with error_number, `delay` late; nothing is moved
    cut,    // only `keep` bytes are moved
    hold,   // the operation does not end before FaultPlan::release()
    delay,  // the result comes `delay` late
    flip,   // one bit of what was read is wrong
  };
  Kind kind = Kind::error;
  io::Action action = io::Action::read;
  std::uint64_t nth = 1;  // of the operations of this kind of action, from 1
  bool sticky = false;    // that one and all later ones
  int error_number = EIO;
  std::size_t keep = 0;
  std::chrono::milliseconds delay{0};
};

// Shared by a test and the backends it wraps. Any thread.
class FaultPlan {
 public:
  void set(const Fault& fault) {
    std::lock_guard lock(mutex_);
    fault_ = fault;
    matched_ = 0;
    hit_ = 0;
    released_ = false;
  }
  void clear() {
    std::lock_guard lock(mutex_);
    fault_.reset();
  }
  void release() {
    std::lock_guard lock(mutex_);
    released_ = true;
  }
  // Results come in another order, some calls later; pushes are refused now and then, as by a full ring.
  void shuffle(std::uint64_t seed) {
    std::lock_guard lock(mutex_);
    random_.emplace(seed);
  }
  std::uint64_t hits() const {
    std::lock_guard lock(mutex_);
    return hit_;
  }
  // The drive keeps what is written in a cache of its own until a flush, and loses it with a flush that fails, as the
  // kernel's page cache does. Call it before the backend is made.
  void cache_writes() {
    std::lock_guard lock(mutex_);
    caching_ = true;
  }
  // Operations whose offset, length or address is no multiple of 4096.
  std::uint64_t unaligned() const {
    std::lock_guard lock(mutex_);
    return unaligned_;
  }
  // Operations of this action that reached the backend since the plan was made, faulty or not.
  std::uint64_t seen(io::Action action) const {
    std::lock_guard lock(mutex_);
    return seen_[static_cast<std::size_t>(action)];
  }

 private:
  friend class FaultyBackend;
  std::optional<Fault> fault_for(const io::KernelOp& op) {
    std::lock_guard lock(mutex_);
    ++seen_[static_cast<std::size_t>(op.action)];
    if ((op.offset | op.length | reinterpret_cast<std::uintptr_t>(op.data)) % kSector != 0) ++unaligned_;
    if (!fault_ || fault_->action != op.action) return {};
    ++matched_;
    if (matched_ != fault_->nth && !(fault_->sticky && matched_ > fault_->nth)) return {};
    ++hit_;
    return fault_;
  }
  bool released() const {
    std::lock_guard lock(mutex_);
    return released_;
  }
  bool caching() const {
    std::lock_guard lock(mutex_);
    return caching_;
  }
  // A number below `limit`, or nothing where results are not to be shuffled.
  std::optional<std::size_t> draw(std::size_t limit) {
    std::lock_guard lock(mutex_);
    if (!random_ || limit == 0) return {};
    return static_cast<std::size_t>((*random_)() % limit);
  }

  mutable std::mutex mutex_;
  std::optional<Fault> fault_;
  std::optional<std::mt19937_64> random_;
  static constexpr std::size_t kSector = 4096;
  std::uint64_t matched_ = 0, hit_ = 0, unaligned_ = 0;
  std::uint64_t seen_[3] = {};
  bool released_ = false, caching_ = false;
};

class FaultyBackend final : public io::Backend {
 public:
  FaultyBackend(std::unique_ptr<io::Backend> inner, std::shared_ptr<FaultPlan> plan)
      : inner_(std::move(inner)), plan_(std::move(plan)) {}

  io::EngineKind kind() const override { return inner_->kind(); }
  io::Error register_files(std::span<const int> descriptors) override {
    descriptors_.assign(descriptors.begin(), descriptors.end());
    return inner_->register_files(descriptors);
  }
  bool registered_files() const override { return inner_->registered_files(); }
  io::Error register_memory(std::span<const std::span<std::byte>> regions) override {
    return inner_->register_memory(regions);
  }

  bool push(const io::KernelOp& op) override {
    if (outstanding_ != 0 && plan_->draw(4) == 0) return false;
    const std::optional<Fault> fault = plan_->fault_for(op);
    ++outstanding_;
    if (!fault && plan_->caching() && op.action != io::Action::read) return cache(op);
    if (!fault) return forward(op);
    switch (fault->kind) {
      case Fault::Kind::error:
        if (op.action == io::Action::flush) cached_.clear();
        late_.push_back({Clock::now() + fault->delay, {op.ticket, -fault->error_number}});
        return true;
      case Fault::Kind::cut: {
        io::KernelOp shorter = op;
        shorter.length =
            std::min(op.length, (fault->keep + FaultPlan::kSector - 1) / FaultPlan::kSector * FaultPlan::kSector);
        if (shorter.length > fault->keep) shortened_.emplace_back(op.ticket, fault->keep);
        if (shorter.length != 0) return forward(shorter);
        late_.push_back({Clock::now(), {op.ticket, 0}});
        return true;
      }
      case Fault::Kind::hold:
        held_.push_back(op);
        return true;
      case Fault::Kind::delay:
        delayed_.push_back({op.ticket, fault->delay});
        return forward(op);
      case Fault::Kind::flip:
        spoiled_.push_back(op);
        return forward(op);
    }
    return false;
  }

  void reap(std::vector<io::KernelResult>& results, std::chrono::nanoseconds timeout) override {
    if (plan_->released()) {
      for (const io::KernelOp& op : std::exchange(held_, {})) forward(op);
    }
    // Without these the caller would sleep through what is due only here.
    if (!pool_.empty()) timeout = std::chrono::nanoseconds{0};
    const std::chrono::nanoseconds tick = std::chrono::milliseconds{1};
    if ((!late_.empty() || !held_.empty() || !refused_.empty()) && (timeout.count() < 0 || timeout > tick))
      timeout = tick;
    for (const io::KernelOp& op : std::exchange(refused_, {})) forward(op);
    std::vector<io::KernelResult> fresh;
    inner_->reap(fresh, timeout);
    for (const io::KernelResult& result : fresh) take(result);
    const auto now = Clock::now();
    for (auto it = late_.begin(); it != late_.end();) {
      if (it->first > now) {
        ++it;
        continue;
      }
      pool_.push_back(it->second);
      it = late_.erase(it);
    }
    deliver(results);
  }

  void wake() override { inner_->wake(); }

 private:
  using Clock = std::chrono::steady_clock;

  bool forward(const io::KernelOp& op) {
    if (!inner_->push(op)) refused_.push_back(op);
    return true;
  }

  // The drive's own cache. Reads before the next flush would miss what is in it: nobody makes any.
  bool cache(const io::KernelOp& op) {
    if (op.action == io::Action::write) {
      cached_.push_back({op.file, op.offset, {op.data, op.data + op.length}});
      late_.push_back({Clock::now(), {op.ticket, static_cast<std::int64_t>(op.length)}});
      return true;
    }
    std::erase_if(cached_, [&](const Cached& written) {
      if (written.file != op.file) return false;
      io::Buffer aligned = io::allocate_buffer(written.bytes.size());
      std::copy(written.bytes.begin(), written.bytes.end(), aligned.data());
      return ::pwrite(descriptors_[op.file], aligned.data(), aligned.size(), static_cast<off_t>(written.offset)) ==
             static_cast<ssize_t>(aligned.size());
    });
    return forward(op);
  }

  void take(io::KernelResult result) {
    for (auto it = shortened_.begin(); it != shortened_.end(); ++it) {
      if (it->first != result.ticket) continue;
      result.value = std::min(result.value, static_cast<std::int64_t>(it->second));
      shortened_.erase(it);
      break;
    }
    for (auto it = delayed_.begin(); it != delayed_.end(); ++it) {
      if (it->first != result.ticket) continue;
      late_.push_back({Clock::now() + it->second, result});
      delayed_.erase(it);
      return;
    }
    for (auto it = spoiled_.begin(); it != spoiled_.end(); ++it) {
      if (it->ticket != result.ticket) continue;
      if (result.value > 0) it->data[static_cast<std::size_t>(result.value) / 2] ^= std::byte{0x10};
      spoiled_.erase(it);
      break;
    }
    pool_.push_back(result);
  }

  void deliver(std::vector<io::KernelResult>& results) {
    while (!pool_.empty()) {
      const std::optional<std::size_t> pick = plan_->draw(pool_.size());
      if (pick) std::swap(pool_[*pick], pool_.back());
      results.push_back(pool_.back());
      pool_.pop_back();
      --outstanding_;
      if (pick && plan_->draw(3) == 0) return;  // the rest comes later
    }
  }

  struct Cached {
    std::uint32_t file;
    std::uint64_t offset;
    std::vector<std::byte> bytes;
  };

  std::unique_ptr<io::Backend> inner_;
  std::shared_ptr<FaultPlan> plan_;
  std::vector<int> descriptors_;
  std::vector<Cached> cached_;
  std::vector<std::pair<std::uint32_t, std::size_t>> shortened_;
  std::vector<io::KernelOp> held_, refused_, spoiled_;
  std::vector<std::pair<std::uint32_t, std::chrono::milliseconds>> delayed_;
  std::vector<std::pair<Clock::time_point, io::KernelResult>> late_;
  std::vector<io::KernelResult> pool_;
  std::size_t outstanding_ = 0;
};

// For VolumeOptions::wrap_backend.
inline std::function<std::unique_ptr<io::Backend>(std::unique_ptr<io::Backend>)> faults(
    std::shared_ptr<FaultPlan> plan) {
  return [plan](std::unique_ptr<io::Backend> inner) { return std::make_unique<FaultyBackend>(std::move(inner), plan); };
}

}  // namespace tierflow::testing

#pragma once
// Drives that are simulated: what the kernel would do happens in memory, and one number decides what goes wrong. Each
// drive has a cache that a flush makes durable; when the power goes, some of the cache survives.
#include <array>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

#include "io/backend.h"

namespace tierflow::testing {

class SimulatedDrives {
 public:
  static constexpr std::size_t kSector = 4096;
  // spoiled: dark, and the sectors that were being written hold neither the old nor the new.
  enum class Goes : std::uint8_t { well, dark, torn, wrong_once, wrong_for_ever, spoiled };
  enum class Survive : std::uint8_t { none, all, last, all_but_one, any };

  explicit SimulatedDrives(std::uint64_t seed, bool lying = false) : random_(seed), lying_(lying) {}

  // From now on: what goes wrong at the nth write or flush. dark: the power goes; torn: in the middle of that write.
  // Counting starts anew.
  void plan(Goes what, std::uint64_t nth) {
    std::lock_guard lock(mutex_);
    what_ = what;
    nth_ = nth;
    operations_ = 0;
  }
  std::uint64_t operations() const {
    std::lock_guard lock(mutex_);
    return operations_;
  }
  // Where the nth read from now on begins, this and further ones fail, so many times in all. Through power cycles.
  void fail_reads(std::uint64_t nth, std::uint64_t times) {
    std::lock_guard lock(mutex_);
    reads_left_ = nth;
    times_ = times;
  }
  // From now on every place can be read.
  void heal() { fail_reads(0, 0); }
  std::uint64_t failed_reads() const {
    std::lock_guard lock(mutex_);
    return failed_reads_;
  }
  bool dark() const {
    std::lock_guard lock(mutex_);
    return dark_;
  }
  // The power comes back: of what was not flushed, so much is there.
  void power_cycle(Survive survive) {
    std::lock_guard lock(mutex_);
    std::size_t spared = cache_.empty() ? 0 : random_() % cache_.size();
    for (std::size_t i = 0; i < cache_.size(); ++i) {
      const bool survives = survive == Survive::all || (survive == Survive::last && i + 1 == cache_.size()) ||
                            (survive == Survive::all_but_one && i != spared) ||
                            (survive == Survive::any && random_() % 2 == 0);
      if (survives) apply(durable_, cache_[i]);
    }
    cache_.clear();
    current_ = durable_;
    dark_ = false;
    what_ = Goes::well;
  }
  // The process died and the drives stayed on: their caches live.
  void restart() {
    std::lock_guard lock(mutex_);
    what_ = Goes::well;
  }

  std::int64_t execute(const io::KernelOp& op) {
    std::lock_guard lock(mutex_);
    if (dark_) return -EIO;
    if (op.action == io::Action::read) {
      if (reads_left_ > 0 && --reads_left_ == 0) bad_ = {op.file, op.offset};
      const bool here = bad_.first == op.file && bad_.second >= op.offset && bad_.second < op.offset + op.length;
      if (reads_left_ == 0 && times_ > 0 && here) {
        --times_;
        ++failed_reads_;
        return -EIO;
      }
      for (std::size_t at = 0; at < op.length; at += kSector) {
        const auto found = current_.find({op.file, op.offset + at});
        if (found == current_.end())
          std::memset(op.data + at, 0, kSector);
        else
          std::memcpy(op.data + at, found->second.data(), kSector);
      }
      return static_cast<std::int64_t>(op.length);
    }
    const bool now = ++operations_ == nth_;
    if (what_ == Goes::wrong_for_ever && operations_ >= nth_ && nth_ != 0) return -EIO;
    if (now && what_ == Goes::wrong_once) return -EIO;
    if (now && (what_ == Goes::dark || what_ == Goes::torn || what_ == Goes::spoiled)) {
      dark_ = true;
      if (what_ == Goes::spoiled && op.action == io::Action::write) spoil(op);
      if (what_ == Goes::torn && op.action == io::Action::write) write(op, random_() % (op.length / kSector + 1));
      return -EIO;
    }
    if (op.action == io::Action::write) {
      write(op, op.length / kSector);
      return static_cast<std::int64_t>(op.length);
    }
    if (!lying_) {
      std::vector<Write> left;
      for (Write& write : cache_) {
        if (write.place.first == op.file)
          apply(durable_, write);
        else
          left.push_back(std::move(write));
      }
      cache_ = std::move(left);
    }
    return 0;
  }

 private:
  using Place = std::pair<std::uint32_t, std::uint64_t>;  // drive, offset
  using Sector = std::array<std::byte, kSector>;
  using Content = std::map<Place, Sector>;
  struct Write {
    Place place;
    std::vector<Sector> sectors;
  };

  static void apply(Content& content, const Write& write) {
    for (std::size_t i = 0; i < write.sectors.size(); ++i)
      content[{write.place.first, write.place.second + i * kSector}] = write.sectors[i];
  }
  void spoil(const io::KernelOp& op) {
    for (std::size_t at = 0; at < op.length; at += kSector) {
      Sector& sector = durable_[{op.file, op.offset + at}];
      for (std::byte& each : sector) each = static_cast<std::byte>(random_());
    }
  }
  void write(const io::KernelOp& op, std::size_t sectors) {
    Write write{.place = {op.file, op.offset}, .sectors = std::vector<Sector>(sectors)};
    for (std::size_t i = 0; i < sectors; ++i) std::memcpy(write.sectors[i].data(), op.data + i * kSector, kSector);
    apply(current_, write);
    cache_.push_back(std::move(write));
  }

  mutable std::mutex mutex_;
  std::minstd_rand random_;
  const bool lying_;
  Goes what_ = Goes::well;
  std::uint64_t nth_ = 0, operations_ = 0, failed_reads_ = 0;
  std::uint64_t reads_left_ = 0, times_ = 0;  // until one fails; that it fails yet
  Place bad_;                                 // where
  bool dark_ = false;
  Content durable_, current_;  // what survives; what a read brings
  std::vector<Write> cache_;
};

class SimulatedBackend final : public io::PlainBackend {
 public:
  explicit SimulatedBackend(std::shared_ptr<SimulatedDrives> drives) : drives_(std::move(drives)) {}
  io::EngineKind kind() const override { return io::EngineKind::threads; }
  bool push(const io::KernelOp& op) override {
    results_.push_back({op.ticket, drives_->execute(op)});
    return true;
  }
  void reap(std::vector<io::KernelResult>& results, std::chrono::nanoseconds timeout) override {
    std::unique_lock lock(mutex_);
    if (results_.empty() && timeout.count() < 0) woken_.wait(lock, [this] { return wakes_; });
    if (results_.empty() && timeout.count() > 0) woken_.wait_for(lock, timeout, [this] { return wakes_; });
    if (timeout.count() != 0) wakes_ = false;
    results.insert(results.end(), results_.begin(), results_.end());
    results_.clear();
  }
  void wake() override {
    std::lock_guard lock(mutex_);
    wakes_ = true;
    woken_.notify_one();
  }

 private:
  std::shared_ptr<SimulatedDrives> drives_;
  std::vector<io::KernelResult> results_;  // of the one thread that pushes and reaps
  std::mutex mutex_;
  std::condition_variable woken_;
  bool wakes_ = false;
};

// As VolumeOptions::wrap_backend. The files that the volume makes hold its headers alone.
inline auto simulated(std::shared_ptr<SimulatedDrives> drives) {
  return [drives](const std::unique_ptr<io::Backend>&) -> std::unique_ptr<io::Backend> {
    return std::make_unique<SimulatedBackend>(drives);
  };
}

}  // namespace tierflow::testing

// pread and pwrite on a pool of threads: works everywhere, uses no system call that a container forbids.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "io/backend.h"
#include "io/thread.h"

namespace tierflow::io {
namespace {

constexpr unsigned kMostThreads = 64;

class ThreadsBackend final : public PlainBackend {
 public:
  explicit ThreadsBackend(unsigned depth) : most_(std::clamp(depth, 1U, kMostThreads)) {}

  ~ThreadsBackend() override {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    work_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  Error start() { return add_thread(); }

  EngineKind kind() const override { return EngineKind::threads; }

  bool push(const KernelOp& op) override {
    bool crowded;
    {
      std::lock_guard lock(mutex_);
      queue_.push_back(op);
      crowded = queue_.size() > idle_ && threads_.size() < most_;
    }
    // Threads come with the load. Where the system gives no more, those that exist go on.
    if (crowded && add_thread()) most_ = static_cast<unsigned>(threads_.size());
    work_.notify_one();
    return true;
  }

  void reap(std::vector<KernelResult>& results, std::chrono::nanoseconds timeout) override {
    std::unique_lock lock(mutex_);
    auto ready = [this] { return !results_.empty() || woken_; };
    if (timeout.count() < 0) {
      done_.wait(lock, ready);
    } else if (timeout.count() > 0) {
      done_.wait_for(lock, timeout, ready);
    }
    if (timeout.count() != 0) woken_ = false;
    results.insert(results.end(), results_.begin(), results_.end());
    results_.clear();
  }

  void wake() override {
    {
      std::lock_guard lock(mutex_);
      woken_ = true;
    }
    done_.notify_one();
  }

 private:
  Error add_thread() {
    std::thread thread;
    if (Error error = start_thread(thread, "tierflow-io", [this] { run(); })) return error;
    threads_.push_back(std::move(thread));
    return {};
  }

  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      ++idle_;
      work_.wait(lock, [this] { return !queue_.empty() || stopping_; });
      --idle_;
      if (queue_.empty()) return;
      const KernelOp op = queue_.front();
      queue_.pop_front();
      lock.unlock();
      const std::int64_t value = perform(op);
      lock.lock();
      results_.push_back({op.ticket, value});
      done_.notify_one();
    }
  }

  std::int64_t perform(const KernelOp& op) const {
    const int descriptor = descriptors_[op.file];
    ssize_t moved = 0;
    switch (op.action) {
      case Action::read:
        moved = pread(descriptor, op.data, op.length, static_cast<off_t>(op.offset));
        break;
      case Action::write:
        moved = pwrite(descriptor, op.data, op.length, static_cast<off_t>(op.offset));
        break;
      case Action::flush:
        moved = fdatasync(descriptor);
        break;
    }
    return moved < 0 ? -errno : moved;
  }

  unsigned most_;
  std::vector<std::thread> threads_;

  std::mutex mutex_;  // guards what follows
  std::condition_variable work_;
  std::condition_variable done_;
  std::deque<KernelOp> queue_;
  std::vector<KernelResult> results_;
  std::size_t idle_ = 0;
  bool woken_ = false;
  bool stopping_ = false;
};

}  // namespace

Result<std::unique_ptr<Backend>> make_threads_backend(unsigned depth) {
  auto backend = std::make_unique<ThreadsBackend>(depth);
  if (Error error = backend->start()) return error;
  return std::unique_ptr<Backend>(std::move(backend));
}

}  // namespace tierflow::io

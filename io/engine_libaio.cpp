// Linux asynchronous I/O through libaio: for kernels and containers without io_uring. Asynchronous only for direct I/O.
// Submission itself blocks on a frozen file system or a full device queue, so a thread of its own submits:
// the caller's goes on keeping the time. One eventfd announces completions, refusals and wake-ups.
#include <libaio.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "io/backend.h"
#include "io/descriptor.h"
#include "io/thread.h"

namespace tierflow::io {
namespace {

class LibaioBackend final : public PlainBackend {
 public:
  ~LibaioBackend() override {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    handed_over_.notify_one();
    if (submitter_.joinable()) submitter_.join();
    if (context_ != nullptr) io_destroy(context_);
  }

  Error start(unsigned depth) {
    event_ = Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));  // without waiting, no signal interrupts its calls
    if (!event_) return refused("eventfd", errno);
    if (const int status = io_setup(static_cast<int>(depth), &context_); status != 0) {
      context_ = nullptr;
      Error error = refused("io_setup", -status);
      if (error.error_number == EAGAIN) error.detail = "raise fs.aio-max-nr";
      return error;
    }
    blocks_.resize(depth);
    return start_thread(submitter_, "tierflow-aio", [this] { submit_all(); });
  }

  EngineKind kind() const override { return EngineKind::libaio; }

  bool push(const KernelOp& op) override {
    if (op.ticket >= blocks_.size()) return false;
    iocb& block = blocks_[op.ticket];
    const int descriptor = descriptors_[op.file];
    switch (op.action) {
      case Action::read:
        io_prep_pread(&block, descriptor, op.data, op.length, static_cast<long long>(op.offset));
        break;
      case Action::write:
        io_prep_pwrite(&block, descriptor, op.data, op.length, static_cast<long long>(op.offset));
        break;
      case Action::flush:
        io_prep_fdsync(&block, descriptor);
        break;
    }
    io_set_eventfd(&block, event_.fd());
    block.data = reinterpret_cast<void*>(std::uintptr_t{op.ticket});
    pushed_.push_back(&block);
    return true;
  }

  void reap(std::vector<KernelResult>& results, std::chrono::nanoseconds timeout) override {
    if (!pushed_.empty()) {
      {
        std::lock_guard lock(mutex_);
        queue_.insert(queue_.end(), pushed_.begin(), pushed_.end());
      }
      pushed_.clear();
      handed_over_.notify_one();
    }
    if (timeout.count() != 0) {
      pollfd wanted{.fd = event_.fd(), .events = POLLIN, .revents = 0};
      timespec limit{.tv_sec = timeout.count() / 1'000'000'000, .tv_nsec = timeout.count() % 1'000'000'000};
      if (ppoll(&wanted, 1, timeout.count() < 0 ? nullptr : &limit, nullptr) > 0) {
        std::uint64_t count = 0;
        (void)!read(event_.fd(), &count, sizeof count);
      }
    }
    {
      std::lock_guard lock(mutex_);
      results.insert(results.end(), refused_.begin(), refused_.end());
      refused_.clear();
    }
    collect(results);
  }

  void wake() override {
    const std::uint64_t one = 1;
    (void)!write(event_.fd(), &one, sizeof one);
  }

 private:
  static Error refused(const char* operation, int error_number) {
    return Error{.kind = ErrorKind::environment, .operation = operation, .error_number = error_number};
  }
  static std::uint32_t ticket_of(const void* data) {
    return static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(data));
  }

  // The submitting thread.
  void submit_all() {
    std::unique_lock lock(mutex_);
    for (;;) {
      handed_over_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      std::array<iocb*, 256> batch;
      const std::size_t count = std::min(batch.size(), queue_.size());
      std::copy_n(queue_.begin(), count, batch.begin());
      lock.unlock();
      const int taken = io_submit(context_, static_cast<long>(count), batch.data());
      const int number = taken == 0 ? EAGAIN : -taken;
      std::int64_t value = -number;
      if (taken <= 0 && number == EAGAIN) std::this_thread::sleep_for(std::chrono::milliseconds{1});
      // The kernel refuses the first of the batch; flushes that it cannot do asynchronously are done here.
      if (taken < 0 && number == EINVAL && batch[0]->aio_lio_opcode == IO_CMD_FDSYNC) {
        value = fdatasync(batch[0]->aio_fildes) == 0 ? 0 : -errno;
      }
      lock.lock();
      if (taken > 0) {
        queue_.erase(queue_.begin(), queue_.begin() + taken);
      } else if (number != EAGAIN && number != EINTR) {
        queue_.pop_front();
        refused_.push_back({ticket_of(batch[0]->data), value});
        wake();
      }
    }
  }

  void collect(std::vector<KernelResult>& results) {
    std::array<io_event, 64> events;
    timespec none{};
    for (;;) {
      const int count = io_getevents(context_, 0, static_cast<long>(events.size()), events.data(), &none);
      for (int i = 0; i < count; ++i)
        results.push_back({ticket_of(events[i].data), static_cast<std::int64_t>(events[i].res)});
      if (count < static_cast<int>(events.size())) return;
    }
  }

  io_context_t context_ = nullptr;
  Descriptor event_;
  std::vector<iocb> blocks_;   // by ticket; the kernel copies each at its submission
  std::vector<iocb*> pushed_;  // since the last reap
  std::thread submitter_;

  std::mutex mutex_;  // guards what follows
  std::condition_variable handed_over_;
  std::deque<iocb*> queue_;
  std::vector<KernelResult> refused_;
  bool stopping_ = false;
};

}  // namespace

Result<std::unique_ptr<Backend>> make_libaio_backend(unsigned depth) {
  auto backend = std::make_unique<LibaioBackend>();
  if (Error error = backend->start(depth)) return error;
  return std::unique_ptr<Backend>(std::move(backend));
}

}  // namespace tierflow::io

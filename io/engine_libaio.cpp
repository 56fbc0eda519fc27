// Linux asynchronous I/O through its system calls: for kernels and containers without io_uring. Asynchronous only for
// direct I/O. Submission itself blocks on a frozen file system or a full device queue, so a thread of its own submits:
// the caller's goes on keeping the time. One eventfd announces completions, refusals and wake-ups.
#include <linux/aio_abi.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "io/backend.h"
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
    if (context_ != 0) syscall(SYS_io_destroy, context_);
    if (event_ >= 0) close(event_);
  }

  Error start(unsigned depth) {
    event_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (event_ < 0) return refused("eventfd");
    if (syscall(SYS_io_setup, depth, &context_) != 0) {
      Error error = refused("io_setup");
      if (error.error_number == EAGAIN) error.detail = "raise fs.aio-max-nr";
      context_ = 0;
      return error;
    }
    blocks_.resize(depth);
    return start_thread(submitter_, "tierflow-aio", [this] { submit_all(); });
  }

  EngineKind kind() const override { return EngineKind::libaio; }

  bool push(const KernelOp& op) override {
    if (op.ticket >= blocks_.size()) return false;
    iocb& block = blocks_[op.ticket];
    block = iocb{};
    block.aio_data = op.ticket;
    block.aio_fildes = static_cast<std::uint32_t>(descriptors_[op.file]);
    block.aio_buf = reinterpret_cast<std::uint64_t>(op.data);
    block.aio_nbytes = op.length;
    block.aio_offset = static_cast<std::int64_t>(op.offset);
    block.aio_flags = IOCB_FLAG_RESFD;
    block.aio_resfd = static_cast<std::uint32_t>(event_);
    switch (op.action) {
      case Action::read:
        block.aio_lio_opcode = IOCB_CMD_PREAD;
        break;
      case Action::write:
        block.aio_lio_opcode = IOCB_CMD_PWRITE;
        break;
      case Action::flush:
        block.aio_lio_opcode = IOCB_CMD_FDSYNC;
        break;
    }
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
      pollfd wanted{.fd = event_, .events = POLLIN, .revents = 0};
      timespec limit{.tv_sec = timeout.count() / 1'000'000'000, .tv_nsec = timeout.count() % 1'000'000'000};
      if (ppoll(&wanted, 1, timeout.count() < 0 ? nullptr : &limit, nullptr) > 0) {
        std::uint64_t count = 0;
        while (read(event_, &count, sizeof count) < 0 && errno == EINTR) {
        }
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
    while (write(event_, &one, sizeof one) < 0 && errno == EINTR) {
    }
  }

 private:
  static Error refused(const char* operation) {
    return Error{.kind = ErrorKind::environment, .operation = operation, .error_number = errno};
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
      const long taken = syscall(SYS_io_submit, context_, static_cast<long>(count), batch.data());
      const int number = taken == 0 ? EAGAIN : errno;
      std::int64_t value = -number;
      if (taken <= 0 && number == EAGAIN) std::this_thread::sleep_for(std::chrono::milliseconds{1});
      // The kernel refuses the first of the batch; flushes that it cannot do asynchronously are done here.
      if (taken < 0 && number == EINVAL && batch[0]->aio_lio_opcode == IOCB_CMD_FDSYNC) {
        value = fdatasync(static_cast<int>(batch[0]->aio_fildes)) == 0 ? 0 : -errno;
      }
      lock.lock();
      if (taken > 0) {
        queue_.erase(queue_.begin(), queue_.begin() + taken);
      } else if (number != EAGAIN && number != EINTR) {
        queue_.pop_front();
        refused_.push_back({static_cast<std::uint32_t>(batch[0]->aio_data), value});
        wake();
      }
    }
  }

  void collect(std::vector<KernelResult>& results) {
    std::array<io_event, 64> events;
    timespec none{};
    for (;;) {
      const long count =
          syscall(SYS_io_getevents, context_, 0L, static_cast<long>(events.size()), events.data(), &none);
      for (long i = 0; i < count; ++i) results.push_back({static_cast<std::uint32_t>(events[i].data), events[i].res});
      if (count < static_cast<long>(events.size())) return;
    }
  }

  aio_context_t context_ = 0;
  int event_ = -1;
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

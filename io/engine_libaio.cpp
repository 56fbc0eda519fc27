// Linux asynchronous I/O through its system calls: for kernels and containers without io_uring. Asynchronous only for
// direct I/O. One eventfd announces both completions and wake-ups. Submission itself blocks on a frozen file system or
// a full device queue: there the volume cannot keep its stall limit, one reason why io_uring comes first.
#include <linux/aio_abi.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <deque>
#include <thread>

#include "io/backend.h"

namespace tierflow::io {
namespace {

constexpr int kSubmitAttempts = 1000;

class LibaioBackend final : public Backend {
 public:
  ~LibaioBackend() override {
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
    return {};
  }

  EngineKind kind() const override { return EngineKind::libaio; }

  Error register_files(std::span<const int> descriptors) override {
    descriptors_.assign(descriptors.begin(), descriptors.end());
    return {};
  }

  Error register_memory(std::span<const std::span<std::byte>>) override {
    return Error{.kind = ErrorKind::environment, .operation = "register", .error_number = EOPNOTSUPP};
  }

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
    unsubmitted_.push_back(&block);
    return true;
  }

  void reap(std::vector<KernelResult>& results, std::chrono::nanoseconds timeout) override {
    submit();
    if (!failed_.empty()) {
      results.insert(results.end(), failed_.begin(), failed_.end());
      failed_.clear();
      timeout = std::chrono::nanoseconds{0};
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

  void submit() {
    for (int attempt = 0; !unsubmitted_.empty(); ++attempt) {
      std::array<iocb*, 256> batch;
      std::size_t count = 0;
      for (iocb* block : unsubmitted_) {
        if (count == batch.size()) break;
        batch[count++] = block;
      }
      const long taken = syscall(SYS_io_submit, context_, static_cast<long>(count), batch.data());
      if (taken > 0) {
        unsubmitted_.erase(unsubmitted_.begin(), unsubmitted_.begin() + taken);
        attempt = 0;
        continue;
      }
      const int number = taken == 0 ? EAGAIN : errno;
      if (number == EINTR) continue;
      if (number == EAGAIN && attempt < kSubmitAttempts) {
        if (attempt > 2) return;  // the next call tries again, after completions made room
        std::this_thread::yield();
        continue;
      }
      // The kernel refuses the first of the batch; flushes it cannot do asynchronously are done here.
      iocb* first = unsubmitted_.front();
      unsubmitted_.pop_front();
      std::int64_t value = -number;
      if (first->aio_lio_opcode == IOCB_CMD_FDSYNC && number == EINVAL) {
        value = fdatasync(static_cast<int>(first->aio_fildes)) == 0 ? 0 : -errno;
      }
      failed_.push_back({static_cast<std::uint32_t>(first->aio_data), value});
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
  std::vector<int> descriptors_;
  std::vector<iocb> blocks_;  // by ticket; the kernel copies them at submission
  std::deque<iocb*> unsubmitted_;
  std::vector<KernelResult> failed_;
};

}  // namespace

Result<std::unique_ptr<Backend>> make_libaio_backend(unsigned depth) {
  auto backend = std::make_unique<LibaioBackend>();
  if (Error error = backend->start(depth)) return error;
  return std::unique_ptr<Backend>(std::move(backend));
}

}  // namespace tierflow::io

// io_uring: one issuer, deferred task work where the kernel has it, registered files and buffers, batched submission.
// The ring can do nothing but move file bytes: it is restricted to the few operations used here before it is enabled.
#include <liburing.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>
#include <thread>

#include "io/backend.h"
#include "io/descriptor.h"
#include "io/fork_guard.h"

namespace tierflow::io {
namespace {

constexpr std::uint64_t kWakeTag = ~std::uint64_t{0};
constexpr int kSubmitAttempts = 1000;

Error refused(const char* operation, int error_number, std::string detail = {}) {
  return Error{.kind = ErrorKind::environment,
               .operation = operation,
               .error_number = error_number,
               .detail = std::move(detail)};
}

class UringBackend final : public Backend {
 public:
  ~UringBackend() override {
    std::vector<KernelResult> none;
    if (wake_armed_) wake();
    for (int attempt = 0; wake_armed_ && attempt < 100; ++attempt) {
      enter(std::chrono::milliseconds{10});
      collect(none);
    }
    if (!ready_) return;
    no_longer_kept(ring_.ring_fd);
    io_uring_queue_exit(&ring_);
  }

  Error start(unsigned depth) {
    event_ = Descriptor(eventfd(0, EFD_CLOEXEC));
    if (!event_) return refused("eventfd", errno);
    // From the best set of flags to none: older kernels refuse what they do not know.
    constexpr unsigned kFlags[] = {IORING_SETUP_R_DISABLED | IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN,
                                   IORING_SETUP_R_DISABLED | IORING_SETUP_COOP_TASKRUN, IORING_SETUP_R_DISABLED, 0};
    int status = -EINVAL;
    unsigned used = 0;
    for (unsigned flags : kFlags) {
      io_uring_params params{};
      params.flags = flags | IORING_SETUP_CLAMP;
      status = io_uring_queue_init_params(std::max(depth + 2, 8U), &ring_, &params);
      used = flags;
      if (status != -EINVAL) break;
    }
    if (status < 0) return refused("io_uring_setup", -status, setup_hint(-status));
    ready_ = true;
    // The ring holds the files that are registered with it, and so their locks.
    keep_from_children(ring_.ring_fd);
    io_uring_ring_dontfork(&ring_);
    if ((ring_.features & IORING_FEAT_NODROP) == 0)
      return refused("io_uring_setup", ENOSYS, "the kernel may drop completions");
    if ((used & IORING_SETUP_R_DISABLED) != 0) {
      restrict_operations();
      if (!control(IORING_REGISTER_ENABLE_RINGS, nullptr, 0)) return refused("io_uring_register", errno);
    }
    return {};
  }

  EngineKind kind() const override { return EngineKind::io_uring; }

  Error register_files(std::span<const int> descriptors) override {
    descriptors_.assign(descriptors.begin(), descriptors.end());
    const int status = io_uring_register_files(&ring_, descriptors_.data(), static_cast<unsigned>(descriptors_.size()));
    files_registered_ = status >= 0;
    return {};
  }
  bool registered_files() const override { return files_registered_; }

  Error register_memory(std::span<const std::span<std::byte>> regions) override {
    if (!regions_.empty()) io_uring_unregister_buffers(&ring_);
    regions_.clear();
    if (regions.empty()) return {};
    std::vector<iovec> vectors;
    for (std::span<std::byte> region : regions) vectors.push_back({region.data(), region.size()});
    const int status = io_uring_register_buffers(&ring_, vectors.data(), static_cast<unsigned>(vectors.size()));
    if (status < 0) return refused("io_uring_register", -status);
    for (std::size_t i = 0; i < regions.size(); ++i) regions_.push_back({regions[i], static_cast<int>(i)});
    std::sort(regions_.begin(), regions_.end(), [](auto& a, auto& b) { return a.bytes.data() < b.bytes.data(); });
    return {};
  }

  bool push(const KernelOp& op) override {
    if (broken_ != 0) {
      failed_.push_back({op.ticket, -broken_});
      return true;
    }
    io_uring_sqe* entry = free_entry();
    if (entry == nullptr) return false;
    const int file = files_registered_ ? static_cast<int>(op.file) : descriptors_[op.file];
    const auto length = static_cast<unsigned>(std::min<std::size_t>(op.length, kLargest));
    const int region = op.action == Action::flush ? -1 : find_region(op.data, length);
    switch (op.action) {
      case Action::read:
        if (region >= 0) {
          io_uring_prep_read_fixed(entry, file, op.data, length, op.offset, region);
        } else {
          io_uring_prep_read(entry, file, op.data, length, op.offset);
        }
        break;
      case Action::write:
        if (region >= 0) {
          io_uring_prep_write_fixed(entry, file, op.data, length, op.offset, region);
        } else {
          io_uring_prep_write(entry, file, op.data, length, op.offset);
        }
        break;
      case Action::flush:
        io_uring_prep_fsync(entry, file, IORING_FSYNC_DATASYNC);
        break;
    }
    unsigned flags = 0;
    if (files_registered_) flags |= IOSQE_FIXED_FILE;
    if (op.patient) flags |= IOSQE_ASYNC;
    io_uring_sqe_set_flags(entry, flags);
    io_uring_sqe_set_data64(entry, op.ticket);
    unsubmitted_.push_back(op.ticket);
    return true;
  }

  void reap(std::vector<KernelResult>& results, std::chrono::nanoseconds timeout) override {
    const std::size_t before = results.size();
    if (timeout.count() != 0 && !wake_armed_ && broken_ == 0) arm_wake();
    // Where results are there already, submit without waiting; with deferred task work they appear only inside
    // io_uring_enter.
    if (io_uring_cq_ready(&ring_) != 0 || !failed_.empty()) timeout = std::chrono::nanoseconds{0};
    enter(timeout);
    collect(results);
    for (const KernelResult& result : failed_) results.push_back(result);
    failed_.clear();
    if (broken_ != 0 && results.size() == before && timeout.count() != 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds{1});
    }
  }

  void wake() override {
    const std::uint64_t one = 1;
    while (write(event_.fd(), &one, sizeof one) < 0 && errno == EINTR) {
    }
  }

 private:
  static constexpr std::size_t kLargest = std::size_t{1} << 30;
  struct Region {
    std::span<std::byte> bytes;
    int index;
  };

  static std::string setup_hint(int number) {
    if (number == EPERM) return "a container profile or kernel.io_uring_disabled forbids io_uring";
    if (number == ENOMEM) return "raise the locked memory limit (ulimit -l)";
    if (number == ENOSYS) return "this kernel has no io_uring";
    return {};
  }

  // liburing 2.3 declares these two and does not export them.
  bool control(unsigned what, void* argument, unsigned count) {
    return syscall(SYS_io_uring_register, ring_.ring_fd, what, argument, count) >= 0;
  }

  void restrict_operations() {
    constexpr std::uint8_t kOps[] = {IORING_OP_READ, IORING_OP_WRITE, IORING_OP_READ_FIXED, IORING_OP_WRITE_FIXED,
                                     IORING_OP_FSYNC};
    constexpr std::uint8_t kRegister[] = {IORING_REGISTER_BUFFERS, IORING_UNREGISTER_BUFFERS, IORING_REGISTER_FILES,
                                          IORING_REGISTER_ENABLE_RINGS};
    std::vector<io_uring_restriction> rules;
    for (std::uint8_t op : kOps) {
      io_uring_restriction rule{};
      rule.opcode = IORING_RESTRICTION_SQE_OP;
      rule.sqe_op = op;
      rules.push_back(rule);
    }
    for (std::uint8_t op : kRegister) {
      io_uring_restriction rule{};
      rule.opcode = IORING_RESTRICTION_REGISTER_OP;
      rule.register_op = op;
      rules.push_back(rule);
    }
    io_uring_restriction flags{};
    flags.opcode = IORING_RESTRICTION_SQE_FLAGS_ALLOWED;
    flags.sqe_flags = IOSQE_FIXED_FILE | IOSQE_ASYNC;
    rules.push_back(flags);
    // A precaution, no need: a kernel that refuses it runs the same operations.
    (void)control(IORING_REGISTER_RESTRICTIONS, rules.data(), static_cast<unsigned>(rules.size()));
  }

  int find_region(const std::byte* data, std::size_t length) const {
    auto after = std::upper_bound(regions_.begin(), regions_.end(), data,
                                  [](const std::byte* key, const Region& region) { return key < region.bytes.data(); });
    if (after == regions_.begin()) return -1;
    const Region& region = *std::prev(after);
    return data + length <= region.bytes.data() + region.bytes.size() ? region.index : -1;
  }

  void arm_wake() {
    io_uring_sqe* entry = free_entry();
    if (entry == nullptr) return;
    io_uring_prep_read(entry, event_.fd(), &event_value_, sizeof event_value_, 0);
    io_uring_sqe_set_data64(entry, kWakeTag);
    unsubmitted_.push_back(kWakeTag);
    wake_armed_ = true;
  }

  // Of a full ring, after what is in it went to the kernel; null where the kernel takes nothing.
  io_uring_sqe* free_entry() {
    if (io_uring_sqe* entry = io_uring_get_sqe(&ring_)) return entry;
    enter(std::chrono::nanoseconds{0});
    return io_uring_get_sqe(&ring_);
  }

  // One io_uring_enter where the kernel is willing. What it did not take stays in the ring for the next call.
  void enter(std::chrono::nanoseconds timeout) {
    for (int attempt = 0;; ++attempt) {
      if (broken_ != 0) {
        // Submits nothing: what was given up must not reach the kernel. What it has taken may be done by now.
        (void)io_uring_get_events(&ring_);
        return;
      }
      const unsigned before = io_uring_sq_ready(&ring_);
      int status;
      if (timeout.count() == 0) {
        status = io_uring_submit_and_get_events(&ring_);
      } else if (timeout.count() < 0) {
        status = io_uring_submit_and_wait(&ring_, 1);
      } else {
        __kernel_timespec limit{.tv_sec = timeout.count() / 1'000'000'000, .tv_nsec = timeout.count() % 1'000'000'000};
        io_uring_cqe* entry = nullptr;
        status = io_uring_submit_and_wait_timeout(&ring_, &entry, 1, &limit, nullptr);
      }
      unsigned taken = before - std::min(before, io_uring_sq_ready(&ring_));
      while (taken-- > 0) unsubmitted_.pop_front();
      const unsigned left = io_uring_sq_ready(&ring_);
      if (status >= 0 || status == -ETIME || status == -EINTR) {
        if (left == 0 || io_uring_cq_ready(&ring_) != 0) return;
        if (status == -ETIME || status == -EINTR) return;
      } else if (status != -EAGAIN && status != -EBUSY && status != -ENOMEM) {
        return fail_unsubmitted(-status);
      }
      if (io_uring_cq_ready(&ring_) != 0) return;  // room is made by reaping
      if (attempt >= kSubmitAttempts) return fail_unsubmitted(status < 0 ? -status : EAGAIN);
      if (attempt > 8) std::this_thread::sleep_for(std::chrono::milliseconds{1});
    }
  }

  // The kernel takes no more: what it never saw fails here, what it has taken still completes.
  void fail_unsubmitted(int error_number) {
    broken_ = error_number == EAGAIN ? EIO : error_number;
    for (std::uint64_t tag : unsubmitted_) {
      if (tag != kWakeTag) failed_.push_back({static_cast<std::uint32_t>(tag), -broken_});
    }
  }

  void collect(std::vector<KernelResult>& results) {
    unsigned head = 0;
    unsigned seen = 0;
    io_uring_cqe* entry = nullptr;
    io_uring_for_each_cqe(&ring_, head, entry) {
      ++seen;
      if (entry->user_data == kWakeTag) {
        wake_armed_ = false;
      } else {
        results.push_back({static_cast<std::uint32_t>(entry->user_data), entry->res});
      }
    }
    io_uring_cq_advance(&ring_, seen);
  }

  io_uring ring_{};
  bool ready_ = false;
  bool files_registered_ = false;
  bool wake_armed_ = false;
  int broken_ = 0;
  Descriptor event_;
  std::uint64_t event_value_ = 0;  // the kernel writes here while the wake-up read is armed
  std::vector<int> descriptors_;
  std::vector<Region> regions_;
  std::deque<std::uint64_t> unsubmitted_;
  std::vector<KernelResult> failed_;
};

}  // namespace

Result<std::unique_ptr<Backend>> make_uring_backend(unsigned depth) {
  auto backend = std::make_unique<UringBackend>();
  if (Error error = backend->start(depth)) return error;
  return std::unique_ptr<Backend>(std::move(backend));
}

}  // namespace tierflow::io

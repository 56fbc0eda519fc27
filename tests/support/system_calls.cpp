#include "tests/support/system_calls.h"

#include <fcntl.h>
#include <libaio.h>
#include <liburing.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <memory>
#include <mutex>

namespace tierflow::testing {
namespace {

std::mutex mutex;
bool watching = false;
Answer answer_of;
std::vector<SystemCall> calls;

std::string path_of(int descriptor) {
  std::string path(512, '\0');
  const ssize_t length = readlink(("/proc/self/fd/" + std::to_string(descriptor)).c_str(), path.data(), path.size());
  path.resize(length < 0 ? 0 : static_cast<std::size_t>(length));
  return path;
}

std::optional<long> ask(std::string_view name, const std::function<std::string()>& path, long argument) {
  const int kept = errno;
  std::lock_guard lock(mutex);
  if (!watching) return {};
  calls.push_back({name, path ? path() : "", argument});
  std::optional<long> answer = answer_of ? answer_of(calls.back()) : std::nullopt;
  errno = kept;
  return answer;
}

std::optional<long> ask(std::string_view name, int descriptor, long argument) {
  return ask(
      name, [descriptor] { return path_of(descriptor); }, argument);
}

template <class T>
T give(long value) {
  if (value >= 0) return static_cast<T>(value);
  errno = static_cast<int>(-value);
  return -1;
}

}  // namespace

SystemCalls::SystemCalls(Answer answer) {
  std::lock_guard lock(mutex);
  watching = true;
  answer_of = std::move(answer);
  calls.clear();
}

SystemCalls::~SystemCalls() {
  std::lock_guard lock(mutex);
  watching = false;
  answer_of = {};
}

std::vector<SystemCall> SystemCalls::seen() const {
  std::lock_guard lock(mutex);
  return calls;
}

std::size_t SystemCalls::count(std::string_view name) const {
  const std::vector<SystemCall> all = seen();
  return static_cast<std::size_t>(
      std::count_if(all.begin(), all.end(), [name](const SystemCall& call) { return call.name == name; }));
}

Answer failing(std::string name, int error_number, std::string part, int times) {
  auto left = std::make_shared<int>(times);
  return [=](const SystemCall& call) -> std::optional<long> {
    if (call.name != name || call.path.find(part) == std::string::npos || *left == 0) return {};
    if (*left > 0) --*left;
    return -error_number;
  };
}

}  // namespace tierflow::testing

using tierflow::testing::ask;
using tierflow::testing::give;

extern "C" {

int __real_open(const char*, int, ...);
int __real_fstat(int, struct stat*);
int __real_fsync(int);
int __real_fdatasync(int);
int __real_fallocate(int, int, off_t, off_t);
int __real_ftruncate(int, off_t);
int __real_fchmod(int, mode_t);
int __real_flock(int, int);
int __real_ioctl(int, unsigned long, ...);
ssize_t __real_pread(int, void*, size_t, off_t);
ssize_t __real_pwrite(int, const void*, size_t, off_t);
int __real_unlink(const char*);
int __real_sync_file_range(int, off_t, off_t, unsigned);
int __real_fstatfs(int, struct statfs*);
int __real_statx(int, const char*, int, unsigned, struct statx*);
int __real_io_setup(int, io_context_t*);
int __real_io_submit(io_context_t, long, iocb**);
int __real_io_uring_queue_init_params(unsigned, io_uring*, io_uring_params*);
int __real_io_uring_submit_and_get_events(io_uring*);
int __real_io_uring_submit_and_wait(io_uring*, unsigned);
int __real_io_uring_submit_and_wait_timeout(io_uring*, io_uring_cqe**, unsigned, __kernel_timespec*, sigset_t*);

int __wrap_open(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(rest, mode_t) : 0;
  va_end(rest);
  if (const auto answer = ask(
          "open", [path] { return std::string(path); }, flags))
    return give<int>(*answer);
  return __real_open(path, flags, mode);
}

int __wrap_fstat(int descriptor, struct stat* info) {
  if (const auto answer = ask("fstat", descriptor, 0)) return give<int>(*answer);
  return __real_fstat(descriptor, info);
}

int __wrap_fsync(int descriptor) {
  if (const auto answer = ask("fsync", descriptor, 0)) return give<int>(*answer);
  return __real_fsync(descriptor);
}

int __wrap_fdatasync(int descriptor) {
  if (const auto answer = ask("fdatasync", descriptor, 0)) return give<int>(*answer);
  return __real_fdatasync(descriptor);
}

int __wrap_fallocate(int descriptor, int mode, off_t offset, off_t length) {
  if (const auto answer = ask("fallocate", descriptor, length)) return give<int>(*answer);
  return __real_fallocate(descriptor, mode, offset, length);
}

int __wrap_ftruncate(int descriptor, off_t length) {
  if (const auto answer = ask("ftruncate", descriptor, length)) return give<int>(*answer);
  return __real_ftruncate(descriptor, length);
}

int __wrap_fchmod(int descriptor, mode_t mode) {
  if (const auto answer = ask("fchmod", descriptor, mode)) return give<int>(*answer);
  return __real_fchmod(descriptor, mode);
}

int __wrap_flock(int descriptor, int operation) {
  if (const auto answer = ask("flock", descriptor, operation)) return give<int>(*answer);
  return __real_flock(descriptor, operation);
}

int __wrap_ioctl(int descriptor, unsigned long request, ...) {
  va_list rest;
  va_start(rest, request);
  void* argument = va_arg(rest, void*);
  va_end(rest);
  if (const auto answer = ask("ioctl", descriptor, static_cast<long>(request))) return give<int>(*answer);
  return __real_ioctl(descriptor, request, argument);
}

ssize_t __wrap_pread(int descriptor, void* data, size_t length, off_t offset) {
  const auto answer = ask("pread", descriptor, static_cast<long>(length));
  if (answer && *answer < 0) return give<ssize_t>(*answer);
  return __real_pread(descriptor, data, answer ? std::min(length, static_cast<size_t>(*answer)) : length, offset);
}

ssize_t __wrap_pwrite(int descriptor, const void* data, size_t length, off_t offset) {
  const auto answer = ask("pwrite", descriptor, static_cast<long>(length));
  if (answer && *answer < 0) return give<ssize_t>(*answer);
  return __real_pwrite(descriptor, data, answer ? std::min(length, static_cast<size_t>(*answer)) : length, offset);
}

int __wrap_unlink(const char* path) {
  if (const auto answer = ask(
          "unlink", [path] { return std::string(path); }, 0))
    return give<int>(*answer);
  return __real_unlink(path);
}

int __wrap_sync_file_range(int descriptor, off_t begin, off_t length, unsigned how) {
  if (const auto answer = ask("sync_file_range", descriptor, begin)) return give<int>(*answer);
  return __real_sync_file_range(descriptor, begin, length, how);
}

int __wrap_fstatfs(int descriptor, struct statfs* info) {
  const auto answer = ask("fstatfs", descriptor, 0);
  if (answer && *answer < 0) return give<int>(*answer);
  const int status = __real_fstatfs(descriptor, info);
  if (answer) info->f_type = *answer;
  return status;
}

int __wrap_statx(int descriptor, const char* path, int flags, unsigned mask, struct statx* info) {
  const auto answer = ask("statx", descriptor, mask);
  if (answer && *answer < 0) return give<int>(*answer);
  const int status = __real_statx(descriptor, path, flags, mask, info);
  if (answer) {
    info->stx_mask |= STATX_DIOALIGN;
    info->stx_dio_offset_align = static_cast<std::uint32_t>(*answer);
    info->stx_dio_mem_align = std::min(info->stx_dio_offset_align, 512U);  // less than in the file, as of real drives
  }
  return status;
}

int __wrap_io_setup(int depth, io_context_t* context) {
  if (const auto answer = ask("io_setup", {}, depth)) return static_cast<int>(*answer);
  return __real_io_setup(depth, context);
}

int __wrap_io_submit(io_context_t context, long count, iocb** requests) {
  const auto answer = ask("io_submit", {}, count);
  if (answer && *answer <= 0) return static_cast<int>(*answer);
  return __real_io_submit(context, answer ? std::min(count, *answer) : count, requests);
}

int __wrap_io_uring_queue_init_params(unsigned entries, io_uring* ring, io_uring_params* params) {
  if (const auto answer = ask("io_uring_setup", {}, params->flags)) return static_cast<int>(*answer);
  return __real_io_uring_queue_init_params(entries, ring, params);
}

int __wrap_io_uring_submit_and_get_events(io_uring* ring) {
  if (const auto answer = ask("io_uring_enter", {}, 0)) return static_cast<int>(*answer);
  return __real_io_uring_submit_and_get_events(ring);
}

int __wrap_io_uring_submit_and_wait(io_uring* ring, unsigned count) {
  if (const auto answer = ask("io_uring_enter", {}, 0)) return static_cast<int>(*answer);
  return __real_io_uring_submit_and_wait(ring, count);
}

int __wrap_io_uring_submit_and_wait_timeout(io_uring* ring, io_uring_cqe** entry, unsigned count,
                                            __kernel_timespec* limit, sigset_t* mask) {
  if (const auto answer = ask("io_uring_enter", {}, 0)) return static_cast<int>(*answer);
  return __real_io_uring_submit_and_wait_timeout(ring, entry, count, limit, mask);
}

}  // extern "C"

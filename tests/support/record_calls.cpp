// Preloaded into the program (LD_PRELOAD), writes a line for each call that changes what files hold or are called, into
// the file $TIERFLOW_CALLS: "write PATH", "allocate PATH", "flush PATH", "rename PATH TO",
// "unlink PATH". A call that $TIERFLOW_FAIL
// names as OPERATION:END_OF_PATH:ERRNO fails with that error: each such call, or the one whose number
// $TIERFLOW_FAIL_NTH is. With `kill` as ERRNO the process kills itself there, before the call; with `stop` it stops
// there until it is sent SIGCONT. A "read" (pread) is never recorded; it fails from that number on. Of
// a file whose path ends with the first part of $TIERFLOW_UNREADABLE, END_OF_PATH:OFFSET, what holds that byte cannot
// be read (EIO), and engines have no ring and no context, so that they read by pread. With OPERATION:END_OF_PATH:FILE
// in $TIERFLOW_LOSE such a call empties FILE first. The process kills itself, as by `kill -9`, at the call whose number
// $TIERFLOW_KILL_AT is: before it, or in the middle of it where it is a write with an odd number. Counted are calls
// that change files or folders, those of a drive's engine included; what io_uring gives to the kernel at once counts as
// one, and an odd number leaves it in flight. Their number is written to $TIERFLOW_CALL_COUNT at the end. Each takes
// $TIERFLOW_CALL_DELAY_MS longer, but for those of io_uring. With $TIERFLOW_CLOCK_JUMPS the wall clock is ten years
// late and ten years early in turn.
#include <dlfcn.h>
#include <fcntl.h>
#include <liburing.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <string>

namespace {

void record(const std::string& line) {
  const int saved = errno;
  if (const char* path = getenv("TIERFLOW_CALLS")) {
    const int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    syscall(SYS_write, file, (line + '\n').c_str(), line.size() + 1);
    close(file);
  }
  errno = saved;
}

std::string path_of(int descriptor) {
  char path[PATH_MAX] = {};
  const std::string link = "/proc/self/fd/" + std::to_string(descriptor);
  return readlink(link.c_str(), path, sizeof path - 1) > 0 ? path : "";
}

// Seconds by which the wall clock is wrong this time.
time_t jump() {
  static const bool jumps = getenv("TIERFLOW_CLOCK_JUMPS") != nullptr;
  static std::atomic<int> looks = 0;
  constexpr time_t kYears = 10 * 365 * 86400;
  return !jumps ? 0 : ++looks % 2 == 0 ? kYears : -kYears;
}

// rule: OPERATION:END_OF_PATH:WHAT
bool matches(const std::string& rule, const std::string& operation, const std::string& path) {
  const std::size_t first = rule.find(':'), last = rule.rfind(':');
  const std::string end = rule.substr(first + 1, last - first - 1);
  return rule.substr(0, first) == operation && path.size() >= end.size() &&
         path.compare(path.size() - end.size(), end.size(), end) == 0;
}

// Records the call; true where it is to fail, errno set.
bool fails(const std::string& operation, const std::string& path, const std::string& to = {}) {
  if (path.empty() || path[0] != '/' || path.find("(deleted)") != std::string::npos ||
      path.compare(0, 5, "/dev/") == 0 || path.compare(0, 6, "/proc/") == 0)
    return false;
  record(operation + ' ' + path + (to.empty() ? "" : ' ' + to));
  if (const char* lose = getenv("TIERFLOW_LOSE"); lose != nullptr && matches(lose, operation, path))
    if (truncate(std::string(lose).substr(std::string(lose).rfind(':') + 1).c_str(), 0) != 0) _exit(99);
  static std::atomic<int> matched = 0;
  const char* wanted = getenv("TIERFLOW_FAIL");
  if (wanted == nullptr || !matches(wanted, operation, path)) return false;
  const char* nth = getenv("TIERFLOW_FAIL_NTH");
  if (nth != nullptr && ++matched != atoi(nth)) return false;
  if (strcmp(strrchr(wanted, ':'), ":kill") == 0) kill(getpid(), SIGKILL);
  if (strcmp(strrchr(wanted, ':'), ":stop") == 0) return kill(getpid(), SIGSTOP) != 0;
  errno = atoi(strrchr(wanted, ':') + 1);
  return true;
}

std::atomic<int> g_counted = 0;

void write_count() {
  if (const char* path = getenv("TIERFLOW_CALL_COUNT")) {
    const int file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    const std::string text = std::to_string(g_counted);
    syscall(SYS_write, file, text.c_str(), text.size());
    close(file);
  }
}
const bool g_written_at_the_end = atexit(write_count) == 0 && at_quick_exit(write_count) == 0;

// half: does half of the call.
template <class Half>
void count_and_die(Half half) {
  const int number = ++g_counted;
  static const char* const wanted = getenv("TIERFLOW_KILL_AT");
  if (wanted == nullptr || number != atoi(wanted)) return;
  if (number % 2 == 1) half();
  kill(getpid(), SIGKILL);
  for (;;) pause();
}
template <class Half>
void maybe_die(Half half) {
  static const char* const delay = getenv("TIERFLOW_CALL_DELAY_MS");
  if (delay != nullptr) usleep(1000 * static_cast<useconds_t>(atoi(delay)));
  count_and_die(half);
}
void maybe_die() {
  maybe_die([] {});
}

std::string absolute(const char* path) {
  if (path[0] == '/') return path;
  char folder[PATH_MAX] = {};
  return getcwd(folder, sizeof folder) == nullptr ? path : std::string(folder) + '/' + path;
}

template <class Function>
Function next(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

// Of liburing, which Python loads where RTLD_NEXT does not look.
template <class Function>
Function ring_call(const char* name) {
  void* const found = dlsym(RTLD_NEXT, name);
  return reinterpret_cast<Function>(found != nullptr ? found
                                                     : dlsym(dlopen("liburing.so.2", RTLD_LAZY | RTLD_NOLOAD), name));
}

bool is_unreadable(const std::string& path, size_t count, off_t offset) {
  static const char* const wanted = getenv("TIERFLOW_UNREADABLE");
  if (wanted == nullptr || !matches("read:" + std::string(wanted), "read", path)) return false;
  const long long byte = atoll(strrchr(wanted, ':') + 1);
  return offset <= byte && byte < offset + static_cast<long long>(count);
}

void enters(io_uring* ring) {
  if (io_uring_sq_ready(ring) != 0)
    count_and_die([&] { ring_call<decltype(&io_uring_submit)>("io_uring_submit")(ring); });
}

}  // namespace

extern "C" {
int io_uring_queue_init_params(unsigned entries, io_uring* ring, io_uring_params* params) {
  if (getenv("TIERFLOW_UNREADABLE") != nullptr) return -EPERM;
  return ring_call<decltype(&io_uring_queue_init_params)>("io_uring_queue_init_params")(entries, ring, params);
}
int io_setup(int events, void* context) {
  if (getenv("TIERFLOW_UNREADABLE") != nullptr) return -EPERM;
  return next<int (*)(int, void*)>("io_setup")(events, context);
}
int io_uring_submit_and_wait(io_uring* ring, unsigned results) {
  enters(ring);
  return ring_call<decltype(&io_uring_submit_and_wait)>("io_uring_submit_and_wait")(ring, results);
}
int io_uring_submit_and_get_events(io_uring* ring) {
  enters(ring);
  return ring_call<decltype(&io_uring_submit_and_get_events)>("io_uring_submit_and_get_events")(ring);
}
int io_uring_submit_and_wait_timeout(io_uring* ring, io_uring_cqe** entry, unsigned results, __kernel_timespec* limit,
                                     sigset_t* mask) {
  enters(ring);
  return ring_call<decltype(&io_uring_submit_and_wait_timeout)>("io_uring_submit_and_wait_timeout")(
      ring, entry, results, limit, mask);
}
ssize_t pwrite(int descriptor, const void* bytes, size_t count, off_t offset) {
  const auto real = next<decltype(&pwrite)>("pwrite");
  maybe_die([&] { (void)!real(descriptor, bytes, count / 2 / 4096 * 4096, offset); });
  if (fails("write", path_of(descriptor))) return -1;
  return real(descriptor, bytes, count, offset);
}
ssize_t pwrite64(int descriptor, const void* bytes, size_t count, off_t offset) {
  return pwrite(descriptor, bytes, count, offset);
}
int clock_gettime(clockid_t clock, struct timespec* now) noexcept {
  const long done = syscall(SYS_clock_gettime, clock, now);
  if (done == 0 && clock == CLOCK_REALTIME) now->tv_sec += jump();
  return static_cast<int>(done);
}
time_t time(time_t* where) noexcept {
  struct timespec now {};
  clock_gettime(CLOCK_REALTIME, &now);
  if (where != nullptr) *where = now.tv_sec;
  return now.tv_sec;
}
ssize_t pread(int descriptor, void* bytes, size_t count, off_t offset) {
  static const char* const wanted = getenv("TIERFLOW_FAIL");
  static std::atomic<int> reads = 0;
  if (is_unreadable(path_of(descriptor), count, offset)) {
    errno = EIO;
    return -1;
  }
  if (wanted != nullptr && matches(wanted, "read", path_of(descriptor))) {
    const char* nth = getenv("TIERFLOW_FAIL_NTH");
    if (nth == nullptr || ++reads >= atoi(nth)) {
      errno = atoi(strrchr(wanted, ':') + 1);
      return -1;
    }
  }
  return next<decltype(&pread)>("pread")(descriptor, bytes, count, offset);
}
ssize_t pread64(int descriptor, void* bytes, size_t count, off_t offset) {
  return pread(descriptor, bytes, count, offset);
}
int fallocate(int descriptor, int mode, off_t offset, off_t length) {
  maybe_die();
  if (fails("allocate", path_of(descriptor))) return -1;
  return next<decltype(&fallocate)>("fallocate")(descriptor, mode, offset, length);
}
int ftruncate(int descriptor, off_t length) noexcept {
  maybe_die();
  return next<decltype(&ftruncate)>("ftruncate")(descriptor, length);
}
int mkdir(const char* path, mode_t mode) noexcept {
  maybe_die();
  return next<decltype(&mkdir)>("mkdir")(path, mode);
}
int rmdir(const char* path) noexcept {
  maybe_die();
  return next<decltype(&rmdir)>("rmdir")(path);
}
ssize_t write(int descriptor, const void* bytes, size_t count) {
  if (descriptor > 2) maybe_die([&] { (void)!next<decltype(&write)>("write")(descriptor, bytes, count / 2); });
  if (fails("write", path_of(descriptor))) return -1;
  return next<decltype(&write)>("write")(descriptor, bytes, count);
}
int fsync(int descriptor) {
  maybe_die();
  return fails("flush", path_of(descriptor)) ? -1 : next<decltype(&fsync)>("fsync")(descriptor);
}
int fdatasync(int descriptor) {
  maybe_die();
  return fails("flush", path_of(descriptor)) ? -1 : next<decltype(&fdatasync)>("fdatasync")(descriptor);
}
int rename(const char* from, const char* to) noexcept {
  maybe_die();
  return fails("rename", absolute(from), absolute(to)) ? -1 : next<decltype(&rename)>("rename")(from, to);
}
int unlink(const char* path) noexcept {
  maybe_die();
  return fails("unlink", absolute(path)) ? -1 : next<decltype(&unlink)>("unlink")(path);
}
}

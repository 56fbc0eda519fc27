// Preloaded into the program (LD_PRELOAD), writes a line for each call that changes what files hold or are called, into
// the file $TIERFLOW_CALLS: "write PATH", "flush PATH", "rename PATH TO", "unlink PATH". A call that $TIERFLOW_FAIL
// names as OPERATION:END_OF_PATH:ERRNO fails with that error: each such call, or the one whose number
// $TIERFLOW_FAIL_NTH is. With OPERATION:END_OF_PATH:FILE in $TIERFLOW_LOSE such a call empties FILE first.
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
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
  errno = atoi(strrchr(wanted, ':') + 1);
  return true;
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

}  // namespace

extern "C" {
ssize_t write(int descriptor, const void* bytes, size_t count) {
  if (fails("write", path_of(descriptor))) return -1;
  return next<decltype(&write)>("write")(descriptor, bytes, count);
}
int fsync(int descriptor) {
  return fails("flush", path_of(descriptor)) ? -1 : next<decltype(&fsync)>("fsync")(descriptor);
}
int fdatasync(int descriptor) {
  return fails("flush", path_of(descriptor)) ? -1 : next<decltype(&fdatasync)>("fdatasync")(descriptor);
}
int rename(const char* from, const char* to) noexcept {
  return fails("rename", absolute(from), absolute(to)) ? -1 : next<decltype(&rename)>("rename")(from, to);
}
int unlink(const char* path) noexcept {
  return fails("unlink", absolute(path)) ? -1 : next<decltype(&unlink)>("unlink")(path);
}
}

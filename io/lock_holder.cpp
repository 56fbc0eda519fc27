#include "io/lock_holder.h"

#include <signal.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>

namespace tierflow::io {

namespace {

// A process that nobody has waited for yet has ended too.
bool has_ended(pid_t process) {
  if (kill(process, 0) != 0) return errno == ESRCH;
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  std::string stat;
  std::getline(file, stat);
  const std::size_t name_end = stat.rfind(')');  // the name may hold anything
  return name_end != std::string::npos && name_end + 2 < stat.size() &&
         (stat[name_end + 2] == 'Z' || stat[name_end + 2] == 'X');
}

}  // namespace

LockHolder lock_holder(int descriptor) {
  struct stat info;
  if (fstat(descriptor, &info) != 0) return {};
  std::ifstream locks("/proc/locks");
  std::array<char, 64> wanted;
  std::snprintf(wanted.data(), wanted.size(), "%02x:%02x:%lu", major(info.st_dev), minor(info.st_dev),
                static_cast<unsigned long>(info.st_ino));
  for (std::string line; std::getline(locks, line);) {
    std::istringstream fields(line);
    std::string number, type, mode, access, where;
    pid_t pid = 0;
    if (fields >> number >> type >> mode >> access >> pid >> where && type == "FLOCK" && where == wanted.data())
      return {.process = pid, .shared = access == "READ", .ended = pid > 0 && has_ended(pid)};
  }
  return {};
}

}  // namespace tierflow::io

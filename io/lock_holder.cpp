#include "io/lock_holder.h"

#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <array>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>

namespace tierflow::io {

pid_t lock_holder(int descriptor) {
  struct stat info;
  if (fstat(descriptor, &info) != 0) return 0;
  std::ifstream locks("/proc/locks");
  std::array<char, 64> wanted;
  std::snprintf(wanted.data(), wanted.size(), "%02x:%02x:%lu", major(info.st_dev), minor(info.st_dev),
                static_cast<unsigned long>(info.st_ino));
  for (std::string line; std::getline(locks, line);) {
    std::istringstream fields(line);
    std::string number, type, mode, access, where;
    pid_t pid = 0;
    if (fields >> number >> type >> mode >> access >> pid >> where && type == "FLOCK" && where == wanted.data())
      return pid;
  }
  return 0;
}

}  // namespace tierflow::io

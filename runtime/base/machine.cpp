#include "runtime/base/machine.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <utility>

namespace tierflow {
namespace {

std::uint64_t number_in(const char* path, const char* key) {
  std::ifstream file(path);
  std::string word;
  while (file >> word)
    if (*key == '\0' || word == key) {
      if (*key != '\0' && !(file >> word)) break;
      try {
        return std::stoull(word);
      } catch (const std::exception&) {
        break;
      }
    }
  return ~std::uint64_t{0};
}

}  // namespace

std::string human_bytes(std::uint64_t bytes) {
  if (bytes >= std::uint64_t{10} << 30) return fmt::format("{:.1f} GiB", bytes / 1073741824.0);
  if (bytes >= std::uint64_t{1} << 30) return fmt::format("{:.2f} GiB", bytes / 1073741824.0);
  if (bytes >= std::uint64_t{10} << 20) return fmt::format("{:.0f} MiB", bytes / 1048576.0);
  if (bytes >= std::uint64_t{1} << 20) return fmt::format("{:.1f} MiB", bytes / 1048576.0);
  return bytes >= 1024 ? fmt::format("{:.0f} KiB", bytes / 1024.0)
                       : fmt::format("{} byte{}", bytes, bytes == 1 ? "" : "s");
}

std::string human_count(double n) {
  if (n >= 1e9) return fmt::format("{:.2f}B", n / 1e9);
  if (n >= 1e5) return fmt::format("{:.{}f}M", n / 1e6, n >= 1e6 ? 1 : 2);
  return fmt::format("{:.0f}", n);
}

std::uint64_t resident_set_peak() {
  // Not getrusage(): its peak includes that of the process which started this one.
  const std::uint64_t peak = number_in("/proc/self/status", "VmHWM:");
  return peak == ~std::uint64_t{0} ? resident_set() : peak * 1024;
}

std::uint64_t resident_set() {
  std::ifstream file("/proc/self/statm");
  std::uint64_t all = 0, resident = 0;
  file >> all >> resident;
  return resident * static_cast<std::uint64_t>(::getpagesize());
}

std::uint64_t memory_available() {
  std::uint64_t available = number_in("/proc/meminfo", "MemAvailable:");
  if (available != ~std::uint64_t{0}) available *= 1024;
  for (const auto& [limit, used] :
       {std::pair{"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"},
        std::pair{"/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"}}) {
    const std::uint64_t most = number_in(limit, ""), now = number_in(used, "");
    if (most != ~std::uint64_t{0} && now != ~std::uint64_t{0} && most > now)
      available = std::min(available, most - now);
  }
  return available;
}

}  // namespace tierflow

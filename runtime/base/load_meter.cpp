#include "runtime/base/load_meter.h"

#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <fstream>
#include <string>

#include "runtime/base/seconds.h"

namespace tierflow {
namespace {

// Of all processors since the machine started; 0 where /proc does not say.
double busy_seconds() {
  std::ifstream file("/proc/stat");
  std::string name;
  double user = 0, nice = 0, system = 0, idle = 0, waiting = 0, interrupts = 0, soft_interrupts = 0, stolen = 0;
  if (!(file >> name >> user >> nice >> system >> idle >> waiting >> interrupts >> soft_interrupts >> stolen)) return 0;
  return (user + nice + system + interrupts + soft_interrupts + stolen) / static_cast<double>(::sysconf(_SC_CLK_TCK));
}

double own_seconds() {
  return static_cast<double>(std::clock()) / CLOCKS_PER_SEC;
}

}  // namespace

LoadMeter::LoadMeter() : started_(std::chrono::steady_clock::now()), busy_(busy_seconds()), own_(own_seconds()) {}

double LoadMeter::other_cores() const {
  const double passed = seconds_since(started_);
  const double others = busy_seconds() - busy_ - (own_seconds() - own_);
  return passed > 0 ? std::max(0.0, others / passed) : 0;
}

}  // namespace tierflow

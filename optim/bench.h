#pragma once
// Measures the optimizer beside a memory stream of the same pattern, alternating in one run. Uses threads of its own.
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

namespace tierflow::optim {

struct BenchOptions {
  std::size_t elements = 64 * 1024 * 1024;
  int threads = 2;
  int repeats = 7;
  std::string only;  // kernels whose name contains this; empty: all
};

struct BenchLine {
  std::string name;     // instruction set, rule, formats
  double mparam_s = 0;  // median over the repeats, 10^6 parameters a second, all threads together
  double best_mparam_s = 0;
  double stream_share = 0;  // median over the repeats of this kernel's speed / the stream's next to it
  double stream_mparam_s =
      0;  // the stream: every byte read and written that the update reads and writes, and no arithmetic to speak of
  int bytes_per_parameter = 0;  // read and written
  int threads = 0;
};

// Calls `report` with one line for each kernel, as soon as it is measured.
void bench_optimizer(const BenchOptions& options, const std::function<void(const BenchLine&)>& report);

// {"name": ..., "mparam_s": ..., ...}
std::string json_of(const BenchLine& line);

}  // namespace tierflow::optim

// optimizer_bench [--elements N] [--threads T] [--repeats R] [--only TEXT]: JSON lines, one a kernel.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "optim/bench.h"

int main(int argc, char** argv) {
  tierflow::optim::BenchOptions options;
  for (int i = 1; i < argc; i += 2) {
    const char* value = i + 1 < argc ? argv[i + 1] : nullptr;
    if (value != nullptr && std::strcmp(argv[i], "--elements") == 0)
      options.elements = std::strtoull(value, nullptr, 10);
    else if (value != nullptr && std::strcmp(argv[i], "--threads") == 0)
      options.threads = std::atoi(value);
    else if (value != nullptr && std::strcmp(argv[i], "--repeats") == 0)
      options.repeats = std::atoi(value);
    else if (value != nullptr && std::strcmp(argv[i], "--only") == 0)
      options.only = value;
    else {
      std::fprintf(stderr, "usage: %s [--elements N] [--threads T] [--repeats R] [--only TEXT]\n", argv[0]);
      return 2;
    }
  }
  tierflow::optim::bench_optimizer(options, [](const tierflow::optim::BenchLine& line) {
    std::puts(json_of(line).c_str());
    std::fflush(stdout);
  });
}

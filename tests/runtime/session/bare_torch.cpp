// What a process takes that does nothing but compute a little with LibTorch: what the memory tests subtract. Prints its
// peak resident set in bytes.
#include <torch/types.h>

#include <cstdio>

#include "runtime/base/machine.h"

int main() {
  auto a = torch::ones({256, 256}, torch::kBFloat16).requires_grad_();
  torch::mm(a, a).sum().backward();
  std::printf("%llu\n", static_cast<unsigned long long>(tierflow::resident_set_peak()));
}

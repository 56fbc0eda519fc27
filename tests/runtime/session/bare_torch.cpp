// What a process takes that does nothing but compute a little with LibTorch: what the memory test subtracts. Prints its
// peak resident set in bytes.
#include <sys/resource.h>
#include <torch/types.h>

#include <cstdio>

int main() {
  auto a = torch::ones({256, 256}, torch::kBFloat16).requires_grad_();
  torch::mm(a, a).sum().backward();
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  std::printf("%ld\n", usage.ru_maxrss * 1024L);
}

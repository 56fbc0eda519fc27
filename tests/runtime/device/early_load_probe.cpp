// Run by early_load_test.cpp. The environment variable CARD is the one file of a card's driver that access() finds.
// Says whether torch's CUDA library is there when main() begins, and whether ATen then has CUDA's hooks.
#include <ATen/detail/CUDAHooksInterface.h>
#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

extern "C" int __real_access(const char* path, int mode);
extern "C" int __wrap_access(const char* path, int mode) {
  if (std::strcmp(path, "/dev/nvidiactl") != 0 && std::strcmp(path, "/dev/dxg") != 0) return __real_access(path, mode);
  const char* card = std::getenv("CARD");
  return card != nullptr && std::strcmp(path, card) == 0 ? 0 : -1;
}

int main() {
  const bool loaded = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD) != nullptr;
  std::printf("%s, %s\n", loaded ? "loaded" : "not loaded",
              at::detail::getCUDAHooks().hasCUDART() ? "CUDA's hooks" : "no hooks");
}

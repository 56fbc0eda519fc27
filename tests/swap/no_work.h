#pragma once
#include "swap/executor.h"

namespace tierflow::swap {

// Measures and updates nothing.
struct NoWork : UpdateWork {
  io::Error measure(const Chunk&, std::span<const std::byte>) override { return {}; }
  io::Error update(const Chunk&, std::span<const std::byte>, std::span<std::byte>, std::span<std::byte>) override {
    return {};
  }
};

}  // namespace tierflow::swap

#pragma once
// The memory that a session or a streamer uses, and its budgets.
#include <cstdint>

namespace tierflow {

// All in bytes.
struct MemoryUse {
  std::uint64_t device_budget = 0, device_peak = 0;  // arena, context, and the most that torch held besides them
  std::uint64_t host_budget = 0, host_used = 0;
  std::uint64_t storage_bytes = 0;
};

}  // namespace tierflow

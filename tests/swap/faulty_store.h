#pragma once
#include "swap/store.h"
#include "tests/support/faulty_backend.h"

namespace tierflow::swap {

// Of a store in a folder whose drive does what the plan says.
inline StoreOptions over_faults(const std::filesystem::path& folder, const std::shared_ptr<testing::FaultPlan>& plan,
                                int generations = 1) {
  return {.volume = {.folders = {folder},
                     .engine = io::EngineKind::threads,
                     .allow_buffered = true,
                     .allow_any_filesystem = true,
                     .wrap_backend = testing::faults(plan)},
          .generations = generations};
}

}  // namespace tierflow::swap

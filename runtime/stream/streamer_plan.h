#pragma once
// Computes packing, layout and arrangement from a Streamer's units and budgets. Shared by streamer*.cpp.
#include <algorithm>
#include <memory>

#include "runtime/stream/streamer.h"
#include "swap/arrange.h"
#include "swap/store.h"

namespace tierflow {

struct StreamerPlan {
  // Throws Exception (kind usage) if the budgets are too small; it names the smallest that work.
  StreamerPlan(const std::vector<UnitSpec>& units, const std::vector<std::vector<int>>& stages,
               const StreamerOptions& options);
  // Makes layout and arrangement; false if the budgets are too small.
  bool fits(const StreamerOptions& options);
  bool needs_store(const StreamerOptions& options) const;
  // identity: of the store that is resumed; otherwise empty.
  swap::StoreOptions store_options(const std::vector<UnitSpec>& units, const StreamerOptions& options,
                                   const std::string& identity = {}) const;

  std::uint64_t host_bytes() const { return arrangement.host_bytes(*layout) + std::max(loading, exporting); }

  PackedModel packed;
  std::uint64_t loading = 0;    // of the host budget: while weights are brought into their formats
  std::uint64_t exporting = 0;  // of it: for a model on its way out beside turns; 0: turns wait for one
  std::unique_ptr<swap::Layout> layout;
  swap::Arrangement arrangement;
};

}  // namespace tierflow

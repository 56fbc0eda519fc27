#pragma once
// Places in storage for what a run makes anew in every step: gradients that wait for their update, the low words of
// sums, activations. None of these bytes outlives the run.
#include <cstdint>
#include <vector>

#include "swap/layout.h"
#include "swap/plan.h"

namespace tierflow::swap {

struct ScratchOptions {
  bool gradients = true;  // room for the gradients of deferred updates
  std::vector<bool>
      gradient_chunks;         // by chunk: whether there is room for its gradient. Empty: there is for all chunks
  bool gradient_sums = false;  // also room for the low words of gradient sums
  std::vector<std::uint64_t> activation_bytes;  // of each extent of activations, multiples of kSector; 0: not stored
};

constexpr bool is_scratch(ExtentKind kind) {
  return kind != ExtentKind::hi && kind != ExtentKind::state;
}

class ScratchPlaces {
 public:
  ScratchPlaces(const ScratchOptions& options, const Layout& layout);

  std::uint64_t bytes() const { return bytes_; }
  // index: a chunk, or for activations an item.
  std::uint64_t offset(ExtentKind kind, int index) const;

 private:
  std::vector<std::uint64_t> gradients_;  // by chunk
  std::vector<std::uint64_t> activations_;
  std::uint64_t gradient_bytes_ = 0, bytes_ = 0;
};

}  // namespace tierflow::swap

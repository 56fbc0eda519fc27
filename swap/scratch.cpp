#include "swap/scratch.h"

namespace tierflow::swap {

ScratchPlaces::ScratchPlaces(const ScratchOptions& options, const Layout& layout) {
  for (const Chunk& chunk : layout.chunks()) {
    const std::size_t id = gradients_.size();
    gradients_.push_back(gradient_bytes_);
    if (chunk.trainable && options.gradients && (options.gradient_chunks.empty() || options.gradient_chunks[id]))
      gradient_bytes_ += chunk.word_bytes();
  }
  bytes_ = gradient_bytes_ + (options.gradient_sums ? gradient_bytes_ : 0);
  for (const std::uint64_t bytes : options.activation_bytes) {
    activations_.push_back(bytes_);
    bytes_ += bytes;
  }
}

std::uint64_t ScratchPlaces::offset(ExtentKind kind, int index) const {
  if (kind == ExtentKind::activations) return activations_[index];
  return gradients_[index] + (kind == ExtentKind::gradient_low ? gradient_bytes_ : 0);
}

}  // namespace tierflow::swap

#include "runtime/session/expert_places.h"

#include <algorithm>

#include "runtime/spec/adapters.h"
#include "runtime/spec/expert_parameters.h"

namespace tierflow {

ExpertPlaces::ExpertPlaces(const ModelSpec& spec, const PackedModel& packed) : packed_(packed) {
  const bool stacked = !spec.config.names.stacked_in.empty();
  for (const StageSpec& stage : spec.stages) {
    if (stage.experts == 0) continue;
    for (const int unit : stage.units) {
      blocks_[unit] = stage.block;
      const std::vector<TensorSpec>& tensors = spec.units[static_cast<std::size_t>(unit)].tensors;
      for (int tensor = 0; tensor < static_cast<int>(tensors.size()); ++tensor) {
        const TensorSpec& of = tensors[static_cast<std::size_t>(tensor)];
        if (of.part != Part::expert || is_adapter(of)) continue;
        // Stacked, biases too have a row for each expert.
        const std::int64_t experts = stacked ? of.shape[0] : 1;
        experts_[{unit, tensor}] = {.first = stacked ? of.first_row : expert_part(spec.config, of).value().expert,
                                    .elements = static_cast<std::uint64_t>(of.elements() / experts)};
      }
    }
  }
}

std::vector<swap::ElementRange> ExpertPlaces::untouched(const swap::Chunk& chunk, const ExpertsTouched& touched) const {
  const auto block = blocks_.find(chunk.unit);
  if (block == blocks_.end()) return {};
  const auto told = touched.find(block->second);
  if (told == touched.end()) return {};
  std::vector<swap::ElementRange> zeros;
  std::uint64_t end = 0;  // of what somebody touched
  const auto touch = [&](std::uint64_t from, std::uint64_t to) {
    if (from > end) zeros.push_back({.begin = end, .end = from});
    end = to;
  };
  for (const TensorPiece& piece : pieces_of(packed_, chunk)) {
    const auto place = experts_.find({chunk.unit, piece.tensor->tensor});
    if (place == experts_.end()) {
      touch(piece.in_chunk, piece.in_chunk + piece.elements);
      continue;
    }
    const auto& [first, elements] = place->second;
    for (std::uint64_t at = 0, next = 0; at < piece.elements; at = next) {
      const std::uint64_t expert = (piece.in_tensor + at) / elements;
      next = std::min(piece.elements, (expert + 1) * elements - piece.in_tensor);
      if (told->second[static_cast<std::size_t>(first) + expert]) touch(piece.in_chunk + at, piece.in_chunk + next);
    }
  }
  touch(chunk.elements, chunk.elements);
  return zeros;
}

}  // namespace tierflow

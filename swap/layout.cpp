#include "swap/layout.h"

#include <algorithm>
#include <stdexcept>

namespace tierflow::swap {

Layout::Layout(std::vector<UnitShape> units, std::vector<StageShape> stages, std::uint64_t chunk_elements)
    : units_(std::move(units)), stages_(std::move(stages)), chunk_elements_(chunk_elements) {
  const std::uint64_t state_limit = chunk_elements * 4 + chunk_elements / 256 * 8;
  users_.assign(units_.size(), 0);
  first_user_.assign(units_.size(), -1);
  on_demand_.assign(units_.size(), false);
  for (int stage = 0; stage < static_cast<int>(stages_.size()); ++stage)
    for (const bool on_demand : {false, true})
      for (const int unit : on_demand ? stages_[stage].on_demand : stages_[stage].units) {
        if (users_[unit] != 0 && on_demand_[unit] != on_demand)
          throw std::logic_error("unit " + units_[unit].name + " is on demand in one stage and not in another");
        if (users_[unit]++ == 0) first_user_[unit] = stage;
        on_demand_[unit] = on_demand;
      }
  for (int unit = 0; unit < static_cast<int>(units_.size()); ++unit) {
    first_chunk_.push_back(static_cast<int>(chunks_.size()));
    std::uint64_t first = 0, gradients = 0;
    int index = 0;
    for (int group = 0; group < static_cast<int>(units_[unit].groups.size()); ++group) {
      const GroupShape& shape = units_[unit].groups[group];
      if (shape.trainable && gradients != first)
        throw std::logic_error("unit " + units_[unit].name + " has a frozen group before a trainable one");
      const bool sparse = shape.sparse_elements != 0;
      if (sparse && (!shape.trainable || users_[unit] != 1))
        throw std::logic_error("unit " + units_[unit].name + " has a sparse group that is frozen or used twice");
      if (shape.sparse_elements % kSparseQuantum != 0 || shape.sparse_elements > kChunkQuantum)
        throw std::logic_error("unit " + units_[unit].name + " has a sparse group in chunks of " +
                               std::to_string(shape.sparse_elements) + " elements");
      std::uint64_t limit = sparse ? shape.sparse_elements : chunk_elements;
      while (limit > kChunkQuantum && shape.state_bytes(limit) > round_up(state_limit, kSector)) limit -= kChunkQuantum;
      for (std::uint64_t begin = 0; begin < shape.elements; begin += limit) {
        const std::uint64_t n = std::min(limit, shape.elements - begin);
        chunks_.push_back({.id = static_cast<int>(chunks_.size()),
                           .unit = unit,
                           .index = index++,
                           .group = group,
                           .first = first + begin,
                           .elements = n,
                           .state_bytes = shape.state_bytes(n),
                           .trainable = shape.trainable,
                           .rewritten = shape.rewritten,
                           .sparse = sparse});
        if (sparse) sparse_chunks_.push_back(chunks_.back().id);
        if (on_demand_[unit]) {
          on_demand_bytes_.resize(std::max<std::size_t>(on_demand_bytes_.size(), index));
          on_demand_bytes_[index - 1] = std::max(on_demand_bytes_[index - 1], chunks_.back().word_bytes());
        }
        max_word_bytes_ = std::max(max_word_bytes_, chunks_.back().word_bytes());
        max_state_bytes_ = std::max(max_state_bytes_, chunks_.back().state_bytes);
      }
      first += shape.elements;
      if (shape.trainable) gradients = first;
    }
    unit_elements_.push_back(first);
    gradient_bytes_.push_back(4 * gradients);
  }
  first_chunk_.push_back(static_cast<int>(chunks_.size()));
}

std::uint64_t Layout::sparse_elements() const {
  if (sparse_chunks_.empty()) return 0;
  const Chunk& chunk = chunks_[sparse_chunks_.front()];
  return units_[chunk.unit].groups[chunk.group].sparse_elements;
}

std::span<const Chunk> Layout::chunks_of(int unit) const {
  return std::span(chunks_).subspan(first_chunk_[unit], first_chunk_[unit + 1] - first_chunk_[unit]);
}

std::span<const Chunk> Layout::trainable_chunks_of(int unit) const {
  const std::span<const Chunk> all = chunks_of(unit);
  return all.first(std::ranges::partition_point(all, &Chunk::trainable) - all.begin());
}

}  // namespace tierflow::swap

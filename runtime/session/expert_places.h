#pragma once
// Where in the chunks of a mixture its experts lie, so that gradients of experts without tokens need not move.
#include <map>
#include <vector>

#include "runtime/models/layered_model.h"
#include "runtime/spec/packing.h"
#include "swap/executor.h"

namespace tierflow {

class ExpertPlaces {
 public:
  // Both outlive it.
  ExpertPlaces(const ModelSpec& spec, const PackedModel& packed);
  // Where the chunk's gradient consists of zeros, because no token took the expert or because no tensor lies there, as
  // UpdateWork::zero_gradient() has it.
  std::vector<swap::ElementRange> untouched(const swap::Chunk& chunk, const ExpertsTouched& touched) const;

 private:
  // Of a tensor: its experts in a row, each of so many elements.
  struct Place {
    std::int64_t first = 0;
    std::uint64_t elements = 0;
  };
  const PackedModel& packed_;
  std::map<int, std::int64_t> blocks_;            // by unit
  std::map<std::pair<int, int>, Place> experts_;  // by unit and tensor
};

}  // namespace tierflow

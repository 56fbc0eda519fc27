#pragma once
// What one micro-batch in a stage takes of a GPU, computed from shapes: operations, bytes through the device's memory,
// kernels started, and the bytes of activations. No torch here.
#include <cstdint>

#include "runtime/spec/model_spec.h"

namespace tierflow {

struct StageCost {
  // Floating-point operations of matrix products: of the forward; of the backward without it; and of the product that
  // ends the forward, which a backward that computes the forward again leaves out.
  double forward_products = 0, backward_products = 0, last_product = 0;
  double attention = 0;  // operations of the forward; the backward takes kAttentionBackward times as many
  // Bytes that everything else reads and writes, and kernels. restored: what follows swapped activations, to have all
  // that is kept.
  double forward_bytes = 0, backward_bytes = 0, restored_bytes = 0;
  double forward_launches = 0, backward_launches = 0;

  // As in ComputeNeeds.
  std::uint64_t carry_bytes = 0, activation_bytes = 0, swapped_bytes = 0;
  // The most that the stage takes while it computes, forward or backward; and of a forward that keeps its activations.
  std::uint64_t peak = 0, keeping_peak = 0;
  // Of what the stage hands to its neighbour, forward or backward.
  std::uint64_t handed_bytes = 0;
};

inline constexpr double kAttentionBackward = 2.5;

// Operations and bytes of activations are those of the program's own code (tests compare them with StageProbe's); bytes
// and launches are counted from the kernels that it calls on a GPU.
StageCost stage_cost(const ModelSpec& spec, int stage, std::int64_t micro_batch, std::int64_t sequence_length);

// Bytes on the device that do not belong to one stage: tables and ids of a micro-batch.
std::uint64_t shared_bytes(const ModelSpec& spec, std::int64_t micro_batch, std::int64_t sequence_length);

}  // namespace tierflow

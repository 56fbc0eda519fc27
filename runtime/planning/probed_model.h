#pragma once
// What a probe of a model's stages found, and what probes of narrower models say of a wider one. No torch here.
#include <array>
#include <cstdint>
#include <vector>

#include "runtime/planning/session_plan.h"
#include "runtime/spec/model_spec.h"
#include "swap/simulator.h"

namespace tierflow {

struct ProbedModel {
  ComputeNeeds needs;
  std::vector<std::uint64_t> stage_peaks, keeping_peaks;  // by stage: the largest are those of `needs`
  std::vector<swap::StageSeconds> seconds;                // by stage, where they were asked for
  double spread = 0;                                      // of those: see Readings
};

// Floating-point operations of a stage's forward of one micro-batch, or what stands for them where it has no products.
double stage_operations(const ModelSpec& spec, int stage, std::int64_t micro_batch, std::int64_t sequence_length);

// Into how many equal parts the model's width can be cut: heads and sizes are a multiple of it.
int width_parts(const ModelSpec& spec);
// The model with `parts` of those alone: fewer heads, narrower layers; as many layers, stages and vocabulary rows.
ModelSpec narrowed(const ModelSpec& spec, int parts);

// What a probe of `spec` would find: bytes along a parabola through those of three narrower models, times of the widest
// by their operations.
struct NarrowProbe {
  int parts = 0;
  ProbedModel probed;
};
ProbedModel widened(const ModelSpec& spec, const std::array<NarrowProbe, 3>& narrowest_first, std::int64_t micro_batch,
                    std::int64_t sequence_length);

}  // namespace tierflow

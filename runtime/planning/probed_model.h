#pragma once
// The result of probing a model's stages, and the extrapolation from probes of narrower models to a wider one. No torch
// here.
#include <array>
#include <cstdint>
#include <vector>

#include "runtime/planning/session_plan.h"
#include "runtime/spec/model_spec.h"
#include "swap/rates.h"

namespace tierflow {

struct ProbedModel {
  ComputeNeeds needs;
  std::vector<std::uint64_t> stage_peaks, keeping_peaks;  // by stage: the largest are those of `needs`
  std::vector<swap::StageSeconds> seconds;                // by stage, where they were asked for
  double spread = 0;                                      // of those: see Readings
};

// Turns bytes and times of a micro-batch of `from` sequences into those of one of `to` sequences, in proportion.
void scale_micro_batch(ProbedModel& probed, std::int64_t to, std::int64_t from);

// Floating-point operations of a stage's forward for one micro-batch, or an equivalent for stages without matrix
// products.
double stage_operations(const ModelSpec& spec, int stage, std::int64_t micro_batch, std::int64_t sequence_length);

// How many equal parts the model's width can be cut into: heads and sizes are multiples of it.
int width_parts(const ModelSpec& spec);
// The model with only `parts` of these parts: fewer heads and narrower layers, the same layers, stages and vocabulary
// rows.
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

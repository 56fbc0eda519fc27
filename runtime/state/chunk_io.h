#pragma once
// FRONT DOOR of state, which a session and a streamer share. Moves tensors to and from the extents of an executor,
// between its plans. Throws Exception.
#include <cstdint>
#include <vector>

#include "runtime/checkpoint/weight_source.h"
#include "runtime/spec/packing.h"
#include "runtime/state/optimizer_work.h"
#include "swap/executor.h"

namespace tierflow {

// Initial content of chunk `id`: weights from their source, moments zero. train: state is kept where the chunk is
// trainable.
void load_chunk(swap::Executor& executor, const swap::Layout& layout, const PackedModel& packed,
                const std::vector<UnitSpec>& units, int id, bool train, UpdateThreads& threads,
                const WeightSource& weights);

// The 16-bit words of a tensor: its bf16 weights (hi), the low words of its fp32 master (state, where it is split), its
// gradient. out: as many as the tensor has elements.
void read_words(swap::Executor& executor, const swap::Layout& layout, const PackedModel& packed, int unit, int tensor,
                swap::ExtentKind kind, std::uint16_t* out);

// Weights and fp32 master of a tensor; its moments stay.
void write_tensor(swap::Executor& executor, const swap::Layout& layout, const PackedModel& packed, int unit, int tensor,
                  const float* values);

}  // namespace tierflow

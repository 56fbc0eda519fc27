#pragma once
// FRONT DOOR of batches. Prepared data (runtime/data/data.h) as a session takes it.
#include <cstdint>

#include "runtime/data/data.h"
#include "runtime/models/micro_batch.h"

namespace tierflow {

// Which sequences are counted: those that are trained on, without end, held out, or all by number.
enum class Sequences : std::uint8_t { training, held_out, numbered };

// A micro-batch of `rows` sequences from the `first` on, on the CPU: ids and labels [rows, data.sequence_length()], and
// where documents in a sequence do not see each other their positions. Throws as Dataset's functions do.
MicroBatch micro_batch(const Dataset& data, Sequences which, std::int64_t first, std::int64_t rows);

}  // namespace tierflow

#pragma once
// FRONT DOOR of batches. Makes micro-batches for a session of prepared data (runtime/data/data.h).
#include <cstdint>

#include "runtime/data/data.h"
#include "runtime/models/micro_batch.h"

namespace tierflow {

// Which sequences a number counts. training: the training sequences, epoch after epoch without end. held_out: the
// held-out ones. numbered: all, as Dataset::numbered_sequence().
enum class Sequences : std::uint8_t { training, held_out, numbered };

// A micro-batch of `rows` sequences from number `first` on, on the CPU: ids and labels [rows, data.sequence_length()],
// and positions if documents in a sequence do not see each other (Dataset::isolated()). Throws as Dataset's functions
// do.
MicroBatch micro_batch(const Dataset& data, Sequences which, std::int64_t first, std::int64_t rows);

}  // namespace tierflow

#pragma once
// A teacher's most likely tokens (runtime/data/teacher_file.h) for prepared data: the shape of a file, and adding them
// to micro-batches.
#include <cstdint>

#include "runtime/base/progress.h"
#include "runtime/batches/data_batches.h"
#include "runtime/data/teacher_file.h"

namespace tierflow {

// Of a file with `top` tokens at each position that counts, from a teacher with this vocabulary. Counts the positions.
// progress: in sequences; it may throw.
TeacherShape teacher_shape(const Dataset& data, std::int64_t top, std::int64_t vocabulary,
                           const Progress& progress = {});

// Throws Exception (kind usage) for a file of other data, or of tokens that a vocabulary of this size does not have.
void check_teacher(const TeacherFile& file, const Dataset& data, std::int64_t vocabulary);

// Adds the teacher's tokens to a micro-batch of the data's training or held-out sequences from number `first` on.
// Throws Exception (kind corruption) if the file is damaged.
void add_teacher(MicroBatch& batch, const TeacherFile& file, const Dataset& data, Sequences which, std::int64_t first);

}  // namespace tierflow

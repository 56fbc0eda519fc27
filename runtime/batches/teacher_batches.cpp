#include "runtime/batches/teacher_batches.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <string>
#include <vector>

#include "runtime/base/exception.h"

namespace tierflow {

TeacherShape teacher_shape(const Dataset& data, std::int64_t top, std::int64_t vocabulary, const Progress& progress) {
  TeacherShape shape{.top = static_cast<std::uint32_t>(top),
                     .vocabulary = static_cast<std::uint64_t>(vocabulary),
                     .sequence_length = static_cast<std::uint64_t>(data.sequence_length()),
                     .sequences = static_cast<std::uint64_t>(data.all_sequences()),
                     .data = data.sequences_hash()};
  std::vector<std::int64_t> ids(shape.sequence_length), labels(shape.sequence_length);
  for (std::uint64_t sequence = 0; sequence < shape.sequences; ++sequence) {
    if (progress) progress("counting positions", sequence, shape.sequences);
    data.numbered_sequence(static_cast<std::int64_t>(sequence), ids, labels);
    shape.positions += static_cast<std::uint64_t>(
        std::count_if(labels.begin(), labels.end(), [](std::int64_t label) { return label >= 0; }));
  }
  return shape;
}

void check_teacher(const TeacherFile& file, const Dataset& data, std::int64_t vocabulary) {
  const TeacherShape& shape = file.shape();
  const auto wrong = [&](const std::string& what) { fail(io::ErrorKind::usage, file.path().string(), what); };
  if (shape.sequence_length != static_cast<std::uint64_t>(data.sequence_length()))
    wrong("was made with --sequence-length " + std::to_string(shape.sequence_length) + ", not " +
          std::to_string(data.sequence_length()));
  if (shape.data != data.sequences_hash() || shape.sequences != static_cast<std::uint64_t>(data.all_sequences()))
    wrong(
        "is of other data than --data, or of the same data prepared otherwise: the tokenizer, the chat template, "
        "--packing and --train-on have to be those of the teacher's pass");
  if (file.largest_id() >= vocabulary)
    wrong("has the token id " + std::to_string(file.largest_id()) + ", but the model's vocabulary ends at " +
          std::to_string(vocabulary - 1) + ": its teacher had another tokenizer");
}

void add_teacher(MicroBatch& batch, const TeacherFile& file, const Dataset& data, Sequences which, std::int64_t first) {
  const std::int64_t rows = batch.labels.size(0), length = batch.labels.size(1), top = file.shape().top;
  batch.teacher_ids = at::zeros({rows, length, top}, at::kInt);
  batch.teacher_log_probabilities = at::zeros({rows, length, top}, at::kHalf);
  std::int32_t* ids = batch.teacher_ids.mutable_data_ptr<std::int32_t>();
  auto* words = static_cast<std::uint16_t*>(batch.teacher_log_probabilities.mutable_data_ptr());
  const std::int64_t* label = batch.labels.const_data_ptr<std::int64_t>();
  for (std::int64_t row = 0; row < rows; ++row) {
    const TeacherTokens tokens = file.read(static_cast<std::uint64_t>(
        which == Sequences::training ? data.number_of_training(first + row) : data.number_of_held_out(first + row)));
    const std::int64_t counted =
        std::count_if(label + row * length, label + (row + 1) * length, [](std::int64_t token) { return token >= 0; });
    if (counted * top != static_cast<std::int64_t>(tokens.ids.size()))
      fail(io::ErrorKind::corruption, file.path().string(), "has another number of positions than its data");
    std::int64_t from = 0;
    for (std::int64_t at = row * length; at < (row + 1) * length; ++at) {
      if (label[at] < 0) continue;
      std::copy_n(tokens.ids.begin() + from, top, ids + at * top);
      std::copy_n(tokens.log_probabilities.begin() + from, top, words + at * top);
      from += top;
    }
  }
}

}  // namespace tierflow

#include "runtime/batches/data_batches.h"

#include <ATen/ops/empty.h>

namespace tierflow {

MicroBatch micro_batch(const Dataset& data, Sequences which, std::int64_t first, std::int64_t rows) {
  const std::int64_t length = data.sequence_length();
  const auto table = [&] { return at::empty({rows, length}, at::kLong); };
  MicroBatch batch{.ids = table(), .labels = table()};
  if (data.isolated()) batch.positions = table();
  const auto row_of = [length](const at::Tensor& tensor, std::int64_t row) {
    return std::span(tensor.data_ptr<std::int64_t>() + row * length, static_cast<std::size_t>(length));
  };
  const auto read = which == Sequences::training   ? &Dataset::training_sequence
                    : which == Sequences::held_out ? &Dataset::held_out_sequence
                                                   : &Dataset::numbered_sequence;
  for (std::int64_t row = 0; row < rows; ++row) {
    (data.*read)(first + row, row_of(batch.ids, row), row_of(batch.labels, row),
                 data.isolated() ? row_of(batch.positions, row) : std::span<std::int64_t>());
    if (which == Sequences::training) batch.lengths.push_back(data.training_tokens(first + row));
  }
  return batch;
}

}  // namespace tierflow

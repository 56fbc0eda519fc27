#include "runtime/program/distillation_run.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>

#include "runtime/base/exception.h"

namespace tierflow {

DistillationRun::DistillationRun(const TrainOptions& options, std::int64_t vocabulary, const Dataset& data)
    : data_(data) {
  if (options.distill.empty()) return;
  file_.emplace(options.distill);
  const TeacherShape& shape = file_->shape();
  const auto wrong = [&](const std::string& what) { fail(io::ErrorKind::usage, file_->path().string(), what); };
  if (shape.sequence_length != static_cast<std::uint64_t>(options.sequence_length))
    wrong(fmt::format("was made with --sequence-length {}, not {}", shape.sequence_length, options.sequence_length));
  if (shape.data != data.sequences_hash() || shape.sequences != static_cast<std::uint64_t>(data.all_sequences()))
    wrong(
        "is of other data than --data, or of the same data prepared otherwise: the tokenizer, the chat template, "
        "--packing and --train-on have to be those of the teacher's pass");
  if (file_->largest_id() >= vocabulary)
    wrong(fmt::format("has the token id {}, but the model's vocabulary ends at {}: its teacher had another tokenizer",
                      file_->largest_id(), vocabulary - 1));
}

std::optional<std::uint64_t> DistillationRun::hash() const {
  return file_ ? std::optional(file_->hash()) : std::nullopt;
}

void DistillationRun::tell(SessionOptions& session) const {
  if (file_) session.loss.distillation.top = file_->shape().top;
}

void DistillationRun::add_to(MicroBatch& batch, std::int64_t first) const {
  if (!file_) return;
  const std::int64_t rows = batch.labels.size(0), length = batch.labels.size(1), top = file_->shape().top;
  batch.teacher_ids = at::zeros({rows, length, top}, at::kInt);
  batch.teacher_log_probabilities = at::zeros({rows, length, top}, at::kHalf);
  std::int32_t* ids = batch.teacher_ids.mutable_data_ptr<std::int32_t>();
  auto* words = static_cast<std::uint16_t*>(batch.teacher_log_probabilities.mutable_data_ptr());
  const std::int64_t* label = batch.labels.const_data_ptr<std::int64_t>();
  for (std::int64_t row = 0; row < rows; ++row) {
    const TeacherTokens tokens = file_->read(static_cast<std::uint64_t>(data_.number_of_training(first + row)));
    const std::int64_t counted =
        std::count_if(label + row * length, label + (row + 1) * length, [](std::int64_t token) { return token >= 0; });
    if (counted * top != static_cast<std::int64_t>(tokens.ids.size()))
      fail(io::ErrorKind::corruption, file_->path().string(), "has another number of positions than its data");
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

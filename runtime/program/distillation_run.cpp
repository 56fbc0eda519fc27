#include "runtime/program/distillation_run.h"

#include "runtime/batches/teacher_batches.h"

namespace tierflow {

DistillationRun::DistillationRun(const TrainOptions& options, std::int64_t vocabulary, const Dataset& data)
    : data_(data) {
  if (options.distill.empty()) return;
  file_.emplace(options.distill);
  check_teacher(*file_, data, vocabulary);
}

std::optional<std::uint64_t> DistillationRun::hash() const {
  return file_ ? std::optional(file_->hash()) : std::nullopt;
}

void DistillationRun::tell(SessionOptions& session) const {
  if (file_) session.loss.distillation.top = file_->shape().top;
}

void DistillationRun::add_to(MicroBatch& batch, std::int64_t first) const {
  if (file_) add_teacher(batch, *file_, data_, Sequences::training, first);
}

}  // namespace tierflow

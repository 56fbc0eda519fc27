#include "runtime/program/teacher_pass.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>

#include "runtime/base/exception.h"
#include "runtime/base/machine.h"
#include "runtime/base/signals.h"
#include "runtime/batches/teacher_batches.h"

namespace tierflow {
namespace {

TeacherShape shape_of(const EvalOptions& options, std::int64_t vocabulary, const Dataset& data, TrainingLog& log) {
  if (options.teacher_top > vocabulary)
    fail(io::ErrorKind::usage, options.model.string(),
         fmt::format("has a vocabulary of {}: --teacher-top {} is more", vocabulary, options.teacher_top));
  const TeacherShape shape = teacher_shape(data, options.teacher_top, vocabulary,
                                           [&](const char* phase, std::uint64_t done, std::uint64_t all) {
                                             throw_if_stopped();
                                             log.progress(phase, done, all);
                                           });
  log.say(fmt::format("teacher's tokens: {} at each of {} positions, {} bytes a position: {} in {}", shape.top,
                      shape.positions, shape.position_bytes(), human_bytes(shape.file_bytes()),
                      options.teacher_out.string()));
  log.object({{"teacher",
               {{"top", shape.top},
                {"positions", shape.positions},
                {"position_bytes", shape.position_bytes()},
                {"bytes", shape.file_bytes()}}}});
  return shape;
}

}  // namespace

TeacherPass::TeacherPass(const EvalOptions& options, std::int64_t vocabulary, const Dataset& data, TrainingLog& log)
    : top_(options.teacher_top),
      vocabulary_(vocabulary),
      model_(options.model.string()),
      file_(options.teacher_out, shape_of(options, vocabulary, data, log)) {}

void TeacherPass::add(const MicroBatch& batch, const HeadScores& scores) {
  const at::Tensor rounded = scores.top_log_probabilities.to(at::kHalf).contiguous();
  const std::int32_t* ids = scores.top_ids.const_data_ptr<std::int32_t>();
  const double* exact = scores.top_log_probabilities.const_data_ptr<double>();
  const auto* words = static_cast<const std::uint16_t*>(rounded.const_data_ptr());
  const std::int64_t* label = batch.labels.const_data_ptr<std::int64_t>();
  const std::int64_t length = batch.labels.size(1);
  for (std::int64_t row = 0; row < batch.labels.size(0); ++row) {
    TeacherTokens tokens;
    for (std::int64_t at = row * length; at < (row + 1) * length; ++at) {
      if (label[at] < 0) continue;
      const std::int64_t first = at * top_, end = first + top_;
      const bool chosen = std::all_of(ids + first, ids + end, [&](std::int32_t id) { return id < vocabulary_; });
      if (!chosen || !std::all_of(exact + first, exact + end, [](double value) { return value <= 0; }))
        fail(io::ErrorKind::numeric, model_,
             "gives log-probabilities that are not finite: the weights, or what they compute, are no numbers");
      tokens.ids.insert(tokens.ids.end(), ids + first, ids + end);
      tokens.log_probabilities.insert(tokens.log_probabilities.end(), words + first, words + end);
    }
    file_.add(tokens);
  }
}

void TeacherPass::finish(const Progress& progress) {
  file_.finish(progress);
}

}  // namespace tierflow

// `tierflow eval`: the loss of a model on text.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>

#include "runtime/base/exception.h"
#include "runtime/base/files.h"
#include "runtime/base/signals.h"
#include "runtime/program/document_scores.h"
#include "runtime/program/run_common.h"
#include "runtime/program/teacher_pass.h"
#include "runtime/program/train.h"

namespace tierflow {

using nlohmann::json;

namespace {

constexpr std::int64_t kMostAtOnce = 32;  // micro-batches: more of them would hide nothing that these do not

}  // namespace

int run_eval(const EvalOptions& options) {
  watch_signals();
  TrainingLog log(options.log_json, false);
  std::optional<DocumentScores> documents;
  if (!options.per_document.empty()) documents.emplace(options.per_document, options.sequence_length);
  const Model model = load_with(options.model, options.adapter, options.base_precision, options.read_as);
  say_what_differs(options.adapter, options, log);
  const ModelSpec& spec = model.spec();
  const Dataset data = prepare_data(data_options(options, spec, temporary_folder()), log);
  if (documents) (void)data.training_documents(0);  // text has none
  const std::uint64_t device_fixed = prepare_torch(device_of(options), options.threads);
  SessionOptions settings = session_settings(options, device_fixed, log.teller());
  settings.train = false;
  std::optional<TeacherPass> teacher;
  if (!options.teacher_out.empty()) {
    teacher.emplace(options, spec.config.vocab_size, data, log);
    settings.top = options.teacher_top;
  }
  const std::int64_t rows = options.micro_batch;
  const Sequences which = teacher ? Sequences::numbered : Sequences::training;
  std::int64_t count = teacher ? data.all_sequences() : data.training_sequences();
  if (options.max_sequences > 0) count = std::min(count, options.max_sequences);
  const std::int64_t batches = (count + rows - 1) / rows;
  // They pass a layer together, so that its weights are fetched once for all of them.
  settings.micro_batches = static_cast<int>(std::clamp<std::int64_t>(batches, 1, kMostAtOnce));
  settings.fewer_micro_batches = true;
  announce_device(options, settings, log);
  const Progress progress = log.stoppable_progress();
  Session session(model, settings, {}, progress);
  log.begin();
  const Evaluation found = session.evaluate(
      batches,
      [&](std::int64_t index) { return micro_batch(data, which, index * rows, std::min(rows, count - index * rows)); },
      [&](std::int64_t index, const MicroBatch& batch, const HeadScores& scores) {
        if (documents) documents->add(data, index * rows, batch, scores);
        if (teacher) teacher->add(batch, scores);
      },
      progress);
  const json result{{"loss", found.loss},
                    {"perplexity", std::exp(found.loss)},
                    {"accuracy", found.accuracy},
                    {"tokens", found.tokens},
                    {"sequences", count}};
  log.object(result);
  if (!std::isfinite(found.loss)) {
    if (documents) documents->write();  // it says whose they are
    throw Exception(
        io::ErrorKind::numeric,
        fmt::format("the loss is not finite over {} tokens: the weights of {}, or what they compute, are no "
                    "numbers; look at where they come from",
                    found.tokens, options.model.string()));
  }
  if (options.json)
    std::cout << result.dump() << std::endl;
  else
    std::cout << fmt::format("loss {:.6f}  perplexity {:.4f}  accuracy {:.4f}  ({} tokens in {} sequences)", found.loss,
                             std::exp(found.loss), found.accuracy, found.tokens, count)
              << std::endl;
  if (documents) documents->write();
  if (teacher) teacher->finish(progress);
  return 0;
}

}  // namespace tierflow

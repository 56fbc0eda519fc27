#include "runtime/program/held_out.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "runtime/base/exception.h"
#include "runtime/base/signals.h"
#include "runtime/batches/data_batches.h"
#include "runtime/program/loss_options.h"

namespace tierflow {
namespace {

bool due(std::int64_t every, std::int64_t step) {
  return every > 0 && step % every == 0;
}

}  // namespace

HeldOut::HeldOut(const TrainOptions& options, const Dataset& data, const PreferenceRun& preference, RunResult& result,
                 TrainingLog& log, RunRecord& record, RunSummary& summary)
    : options_(options),
      data_(data),
      preference_(preference),
      result_(result),
      log_(log),
      record_(record),
      summary_(summary) {
  if (data_.held_out_sequences() == 0 &&
      (options.eval_every > 0 || options.export_best || options.early_stopping_patience > 0))
    fail_usage(
        "--eval-every, --export-best and --early-stopping-patience need held-out sequences, and there are none: raise "
        "--held-out, or give more data");
}

void HeldOut::recall(const Session& session) {
  if (session.steps() == 0) return;
  std::string configuration = std::move(record_.configuration);
  record_ = RunRecord::parse(session.remembered());
  record_.configuration = std::move(configuration);
  summary_.held_out_before = record_.held_out_before;
  summary_.last_loss = record_.last_loss;
  summary_.evaluated = std::isfinite(summary_.held_out_before);
  if (record_.evaluated_sequences == sequences()) return;
  if (record_.evaluated != 0)
    log_.say("other held-out sequences are evaluated than before: which loss is the lowest is counted anew");
  record_.best = {};
}

void HeldOut::remember(Session& session) {
  record_.last_loss = summary_.last_loss;
  record_.held_out_before = summary_.held_out_before;
  session.remember(record_.json());
}

std::int64_t HeldOut::sequences() const {
  const std::int64_t all = data_.held_out_sequences();
  return options_.eval_sequences > 0 ? std::min(all, options_.eval_sequences * sequences_in_one(options_)) : all;
}

void HeldOut::evaluate(Session& session, std::int64_t step, double& loss) {
  const std::int64_t count = sequences();
  if (count == 0) return;
  const Progress progress = [&](const char* phase, std::uint64_t done, std::uint64_t total) {
    if (step == 0) throw_if_stopped();
    log_.progress(phase, done, total);
  };
  if (data_.pairs()) {
    const PairTotals found = preference_.evaluate(session, count, progress);
    loss = found.mean_loss();
    log_.evaluation(step, found, session);
  } else {
    const Evaluation found = evaluate_sequences(session, count, progress);
    loss = found.loss;
    log_.evaluation(step, found, session);
  }
  evaluated_at_ = step;
  summary_.evaluated = true;
}

Evaluation HeldOut::evaluate_sequences(Session& session, std::int64_t count, const Progress& progress) const {
  const std::int64_t rows = options_.micro_batch;
  return session.evaluate((count + rows - 1) / rows,
                          [&](std::int64_t index) {
                            return micro_batch(data_, Sequences::held_out, index * rows,
                                               std::min(rows, count - index * rows));
                          },
                          {}, progress);
}

bool HeldOut::may_write(std::int64_t step) const {
  return due(options_.export_every, step) || (options_.export_best && due(options_.eval_every, step));
}

void HeldOut::between_steps(Session& session, std::int64_t step, std::int64_t begun) {
  if (due(options_.eval_every, step) && record_.evaluated != step) {
    evaluate(session, step, summary_.held_out_after);
    record_.best.take(step, summary_.held_out_after, options_.early_stopping_threshold);
    record_.evaluated = step;
    record_.evaluated_sequences = sequences();
    remember(session);
  }
  const bool best = options_.export_best && record_.best.step == step;
  if ((!best && !due(options_.export_every, step)) || stop_signal() != 0) return;
  result_.finish_beside(session);  // of the one before, which this record tells
  const auto written = [this, &session, best, step, loss = record_.best.loss] {
    if (best) {
      record_.exported = step;
      record_.exported_loss = loss;
    }
    remember(session);
  };
  if (step == begun && result_.has_checkpoint(step)) return written();
  const std::int64_t stays = best ? step : options_.export_best ? record_.exported : 0;
  result_.write_checkpoint(session, stays, best ? record_.exported : 0, written);
}

bool HeldOut::stops_early() const {
  return options_.early_stopping_patience > 0 && record_.best.since >= options_.early_stopping_patience;
}

void HeldOut::say_best(std::int64_t step, bool usable) const {
  if (!options_.export_best) return;
  std::optional<std::pair<std::int64_t, double>> result;
  if (usable && evaluated(step)) result.emplace(step, summary_.held_out_after);
  say_which_is_best(options_, record_, result_.has_checkpoint(record_.exported), result, log_);
}

}  // namespace tierflow

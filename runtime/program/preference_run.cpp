#include "runtime/program/preference_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "runtime/base/exception.h"
#include "runtime/base/machine.h"
#include "runtime/base/signals.h"
#include "runtime/models/pair_batch.h"
#include "runtime/planning/left_store.h"
#include "runtime/planning/reference_file.h"
#include "runtime/program/loss_options.h"

namespace tierflow {

namespace {

LossRule rule_of(const TrainOptions& options, bool base_is_reference) {
  LossRule rule = loss_rule(options);
  rule.base_is_reference = base_is_reference;
  return rule;
}

}  // namespace

PreferenceRun::PreferenceRun(const TrainOptions& options, const Dataset& data, bool base_is_reference)
    : options_(options),
      data_(data),
      rule_(rule_of(options, base_is_reference)),
      rows_(options.micro_batch * sequences_in_one(options)) {}

void PreferenceRun::set_aside(SessionOptions& session, const Say& say) const {
  if (!rule_.needs_reference() || rule_.computes_reference()) return;
  const auto pairs = static_cast<std::uint64_t>(data_.all_sequences()) / 2, bytes = kReferenceRam * pairs;
  if (bytes >= session.host_memory)
    fail_usage(
        fmt::format("the reference of {} pairs takes {} of the host's {}: give more "
                    "--host-memory",
                    pairs, human_bytes(bytes), human_bytes(session.host_memory)));
  session.host_memory -= bytes;
  say(fmt::format("the reference of {} pairs takes {} of --host-memory", pairs, human_bytes(bytes)));
}

void PreferenceRun::set_reference(Session& session, const std::string& identity, TrainingLog& log) {
  if (!rule_.needs_reference()) return;
  if (rule_.computes_reference()) return log.say("reference: the base, computed in the visits of each step");
  const bool stored = session.storage_mode().has_value();
  if (session.steps() > 0) {
    reference_ = read_reference(reference_beside(options_.storage), identity, data_.all_sequences());
    return;
  }
  reference_ = computed_reference(session, log);
  if (stored) write_reference(reference_beside(options_.storage), identity, reference_);
  log.say(fmt::format("reference: {} pairs, computed before the first step", reference_.size() / 2));
}

std::vector<double> PreferenceRun::computed_reference(Session& session, TrainingLog& log) const {
  const std::int64_t rows = data_.all_sequences();
  std::vector<double> reference(static_cast<std::size_t>(rows));
  score(
      session, Sequences::numbered, rows,
      [&](std::int64_t first, const MicroBatch& batch, const HeadScores& scores) {
        const std::vector<double> sums = row_log_probabilities(batch, scores.losses);
        std::copy(sums.begin(), sums.end(), reference.begin() + first);
      },
      [&](const char*, std::uint64_t done, std::uint64_t total) {
        throw_if_stopped();
        log.progress("computing the reference", done, total);
      });
  log.no_step_moved_that(session);
  if (!std::all_of(reference.begin(), reference.end(), [](double sum) { return std::isfinite(sum); }))
    fail(io::ErrorKind::numeric, options_.model.string(),
         "gives log-probabilities that are not finite: the weights, or what they compute, are no numbers");
  return reference;
}

MicroBatch PreferenceRun::batch(Sequences which, std::int64_t first, std::int64_t rows) const {
  MicroBatch batch = micro_batch(data_, which, first, rows);
  for (std::int64_t row = first; row < first + rows && !reference_.empty(); ++row) {
    const std::int64_t number =
        which == Sequences::training ? data_.number_of_training(row) : data_.number_of_held_out(row);
    batch.reference.push_back(reference_.at(static_cast<std::size_t>(number)));
  }
  return batch;
}

PairTotals PreferenceRun::evaluate(Session& session, std::int64_t rows, const Progress& progress) const {
  PairTotals totals;
  score(
      session, Sequences::held_out, rows,
      [&](std::int64_t, MicroBatch batch, const HeadScores& scores) {
        if (rule_.computes_reference()) batch.reference = row_log_probabilities(batch, scores.reference_losses);
        totals.add(pair_totals(rule_, batch, scores.losses));
      },
      progress);
  return totals;
}

void PreferenceRun::score(Session& session, Sequences which, std::int64_t rows, const Scored& use,
                          const Progress& progress) const {
  const auto made = [&](std::int64_t index) {
    return batch(which, index * rows_, std::min(rows_, rows - index * rows_));
  };
  session.evaluate(
      (rows + rows_ - 1) / rows_,
      [&](std::int64_t index) {
        MicroBatch counted = made(index);
        counted.labels = head_labels(rule_, counted);
        return counted;
      },
      [&](std::int64_t index, const MicroBatch&, const HeadScores& scores) { use(index * rows_, made(index), scores); },
      progress);
}

}  // namespace tierflow

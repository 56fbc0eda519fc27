#include "runtime/planning/prediction.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>

#include "runtime/base/exception.h"
#include "runtime/planning/store_cut.h"
#include "swap/planner.h"

namespace tierflow {

swap::Rates rates_of(const ModelSpec& spec, const Profile& profile) {
  return {.machine = profile.machine.rates,
          .update = profile.machine.update,
          .device_update = profile.machine.device_update,
          .stages = profile.model.seconds(spec)};
}

namespace {

constexpr int kSteps = 4;
constexpr double kSame = 1e-9;  // of a step's time: as long as another one

enum class Steps : std::uint8_t {
  all,        // whose records stay
  to_steady,  // to the first that takes as long as the one before
};

// Nothing where the second step, others like which follow, takes longer than `longest`.
std::optional<Prediction> play(const SessionPlan& plan, swap::Rates rates, int steps, Steps wanted, double longest) {
  // Of the head's three products with its weights, the forward is one.
  if (plan.head_scores_first) rates.stages.back().head *= 4.0 / 3;
  swap::Planner planner(*plan.layout, plan.arrangement);
  swap::Simulator simulator(*plan.layout, plan.arrangement.deferred, std::move(rates));
  Prediction prediction;
  bool pending = false;
  for (int step = 0; step < steps; ++step) {
    const double begin = simulator.now(), before = prediction.step_seconds;
    swap::Plan tasks = planner.train_step(pending, plan.commit_every == 1 && step > 0);
    prediction.bytes = {};
    for (const swap::Task& task : tasks.tasks) prediction.bytes[static_cast<int>(task.lane)] += task.bytes;
    simulator.append(std::move(tasks));
    simulator.finish_updates();
    pending = plan.defers();
    prediction.step_seconds = simulator.now() - begin;
    if (step == 1 && prediction.step_seconds > longest) return std::nullopt;
    std::vector<swap::TaskRecord> records = simulator.take_records();
    const bool last = step + 1 == steps || (wanted == Steps::to_steady && step > 1 &&
                                            std::abs(prediction.step_seconds - before) < kSame * before);
    if (wanted == Steps::all) prediction.records.insert(prediction.records.end(), records.begin(), records.end());
    if (!last) continue;
    for (swap::TaskRecord& record : records)
      record.begin = std::max(record.begin, begin);  // the step before left writes
    prediction.step = swap::summarise(records);
    break;
  }
  return prediction;
}

}  // namespace

Prediction predict(const SessionPlan& plan, const swap::Rates& rates, int steps) {
  return *play(plan, rates, steps, Steps::all, std::numeric_limits<double>::infinity());
}

namespace {

// Tries settings of `options` one after the other and leaves it with the fastest.
class Search {
  SessionOptions& options_;
  const ModelSpec& spec_;
  const swap::Rates rates_;
  std::vector<std::pair<swap::Arrangement, int>> tried_;  // and its commit_every: what a prediction depends on

 public:
  Search(const ModelSpec& spec, SessionOptions& options, const Profile& profile)
      : options_(options),
        spec_(spec),
        rates_(rates_of(spec, profile)),
        needs(profile.model.needs(spec)),
        plan(plan_session(spec, options, needs)),
        prediction(*play(plan, rates_, kSteps, Steps::to_steady, std::numeric_limits<double>::infinity())) {
    tried_.emplace_back(plan.arrangement, plan.commit_every);
  }

  // Sets what `settings` does where the step is then shorter than `worthwhile` of the shortest so far.
  template <class Settings>
  void attempt(double worthwhile, Settings settings) {
    const SessionOptions before = options_;
    settings(options_);
    try {
      SessionPlan tried = plan_session(spec_, options_, needs);
      std::pair key{tried.arrangement, tried.commit_every};
      if (std::find(tried_.begin(), tried_.end(), key) == tried_.end()) {
        tried_.push_back(std::move(key));
        const double shortest = worthwhile * prediction.step_seconds;
        auto of_tried = play(tried, rates_, kSteps, Steps::to_steady, (1 + kSame) * shortest);
        if (of_tried && of_tried->step_seconds < shortest) {
          plan = std::move(tried);
          prediction = *std::move(of_tried);
          return;
        }
      }
    } catch (const Exception&) {
      // It takes more memory than there is.
    }
    options_ = before;
  }

  const ComputeNeeds needs;
  SessionPlan plan;
  Prediction prediction;
};

void choose_swaps(const SessionOptions& options, Search& search) {
  constexpr int kShares = 4;
  constexpr double kWorthwhile = 0.99;
  const swap::Arrangement& at = search.plan.arrangement;
  const int items = static_cast<int>(at.items.size());
  const auto computed_again = static_cast<int>(std::ranges::count_if(at.items, [&](const swap::Item& item) {
    return item.activations == swap::Activations::recompute && search.needs.swapped_bytes[item.made_by.stage] != 0;
  }));
  if (computed_again == 0) return;
  // The last share is all there are: the slots take memory in which activations were kept.
  const auto share = [&](int of) { return of == kShares ? items : computed_again * of / kShares; };
  for (int of = 1; of <= kShares; ++of)
    search.attempt(kWorthwhile, [&](SessionOptions& tried) { tried.swap_to_host = share(of); });
  for (int of = 1; of <= kShares && !options.storage.empty(); ++of)
    search.attempt(kWorthwhile, [&](SessionOptions& tried) { tried.swap_to_storage = share(of); });
}

void choose_updates(const SessionOptions& options, const Profile& profile, Search& search) {
  constexpr double kWorthwhile = 0.98;
  const double computing = search.prediction.step.busy_seconds[static_cast<int>(swap::Lane::compute)];
  if (computing > kWorthwhile * search.prediction.step_seconds) return;
  const std::vector<double> deferred = options.clip ? std::vector{0.0} : std::vector{0.0, 0.25, 0.5, 0.75, 1.0},
                            on_device =
                                profile.machine.device_update.empty() ? std::vector{0.0} : std::vector{0.0, 0.5, 1.0};
  for (const double device_share : on_device)
    for (const double deferred_share : deferred) {
      if (device_share == 0 && deferred_share == 0) continue;
      search.attempt(kWorthwhile, [&](SessionOptions& tried) {
        tried.deferred_share = deferred_share;
        tried.device_update_share = device_share;
      });
    }
}

}  // namespace

Placement choose_placement(const ModelSpec& spec, SessionOptions& options, const Profile& profile) {
  options.swap_to_host = options.swap_to_storage = 0;
  options.deferred_share = options.device_update_share = 0;
  if (options.resume && options.chunk_elements != 0) {
    const auto plan_with = [&](std::uint64_t chunk_elements) {
      options.chunk_elements = chunk_elements;
      return plan_session(spec, options, profile.model.needs(spec));
    };
    options.chunk_elements =
        plan_to_go_on(options.chunk_elements, options.host_memory, plan_with).layout->chunk_elements();
  }
  Search search(spec, options, profile);
  const double without_swaps = search.prediction.step_seconds;
  choose_swaps(options, search);
  const double plain_updates = search.prediction.step_seconds;
  choose_updates(options, profile, search);
  return {.plan = std::move(search.plan),
          .prediction = std::move(search.prediction),
          .step_seconds_without_swaps = without_swaps,
          .step_seconds_plain_updates = plain_updates};
}

std::optional<double> step_seconds_unclipped(const ModelSpec& spec, SessionOptions options, const Profile& profile) {
  if (!options.clip) return std::nullopt;
  options.clip.reset();
  try {
    Search search(spec, options, profile);
    choose_updates(options, profile, search);
    return search.prediction.step_seconds;
  } catch (const Exception&) {
    return std::nullopt;
  }
}

}  // namespace tierflow

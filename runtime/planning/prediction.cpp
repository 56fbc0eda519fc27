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
constexpr double kForever = std::numeric_limits<double>::infinity();

enum class Steps : std::uint8_t {
  all,         // whose records stay
  to_steady,   // to the first that takes as long as the one before
  time_alone,  // the same, without what needs records
};

// A session's steps, one after the other.
class Clock {
 public:
  Clock(const SessionPlan& plan, swap::Rates rates)
      : plan_(plan),
        planner_(*plan.layout, plan.arrangement),
        simulator_(*plan.layout, plan.arrangement.deferred, with_head(plan, std::move(rates))) {
    simulator_.without_records();
    planner_.hand_over_to([this](const swap::Plan& part) { append(part); });
  }
  Clock(const Clock&) = delete;

  // Plays the next one. number: 0 for a run's first; any other finds what a step before it left to do. False, and not
  // all of it played, where it takes longer than `longest`. records: whether its tasks leave some.
  bool step(int number, double longest, bool records) {
    begin_ = simulator_.now();
    bytes_ = {};
    if (records) simulator_.record();
    const bool pending = number > 0 && plan_.defers(), commits = number > 0 && plan_.commit_every == 1;
    append(planner_.train_step(pending, commits));
    return simulator_.finish_updates(begin_ + longest);
  }
  // Of that step.
  double begin() const { return begin_; }
  double seconds() const { return simulator_.now() - begin_; }
  const std::array<std::uint64_t, swap::kLanes>& bytes() const { return bytes_; }
  std::vector<swap::TaskRecord> take_records() { return simulator_.take_records(); }

 private:
  static swap::Rates with_head(const SessionPlan& plan, swap::Rates rates) {
    // Of the head's three products with its weights, the forward is one.
    if (plan.head_scores_first) rates.stages.back().head *= 4.0 / 3;
    return rates;
  }

  void append(const swap::Plan& part) {
    for (const swap::Task& task : part.tasks) bytes_[static_cast<int>(task.lane)] += task.bytes;
    simulator_.append(part);
  }

  const SessionPlan& plan_;
  swap::Planner planner_;
  swap::Simulator simulator_;
  double begin_ = 0;
  std::array<std::uint64_t, swap::kLanes> bytes_{};
};

// Nothing where the second step, others like which follow, takes longer than `longest`.
std::optional<Prediction> play(const SessionPlan& plan, const swap::Rates& rates, int steps, Steps wanted,
                               double longest) {
  Clock clock(plan, rates);
  Prediction prediction;
  for (int step = 0; step < steps; ++step) {
    const double before = prediction.step_seconds;
    // What the last step finds unfinished of the one before leaves records too.
    const bool records = wanted == Steps::all || (wanted == Steps::to_steady && step > 0);
    if (!clock.step(step, step == 1 ? longest : kForever, records)) return std::nullopt;
    prediction.step_seconds = clock.seconds();
    prediction.bytes = clock.bytes();
    std::vector<swap::TaskRecord> of_step = clock.take_records();
    const bool last = step + 1 == steps ||
                      (wanted != Steps::all && step > 1 && std::abs(prediction.step_seconds - before) < kSame * before);
    if (wanted == Steps::all) prediction.records.insert(prediction.records.end(), of_step.begin(), of_step.end());
    if (!last) continue;
    for (swap::TaskRecord& record : of_step)
      record.begin = std::max(record.begin, clock.begin());  // the step before left writes
    prediction.step = swap::summarise(of_step);
    break;
  }
  return prediction;
}

}  // namespace

Prediction predict(const SessionPlan& plan, const swap::Rates& rates, int steps) {
  return *play(plan, rates, steps, Steps::all, kForever);
}

namespace {

// Tries settings of `options` one after the other and leaves it with the fastest.
class Search {
  SessionOptions& options_;
  const ModelSpec& spec_;
  const swap::Rates rates_;
  std::vector<std::pair<swap::Arrangement, int>> tried_;  // and its commit_every: what a prediction depends on
  std::optional<Prediction> prediction_;                  // of `plan`, once it was asked for

 public:
  Search(const ModelSpec& spec, SessionOptions& options, const Profile& profile)
      : options_(options),
        spec_(spec),
        rates_(rates_of(spec, profile)),
        needs(profile.model.needs(spec)),
        plan(plan_session(spec, options, needs)),
        step_seconds(prediction().step_seconds) {
    tried_.emplace_back(plan.arrangement, plan.commit_every);
  }

  // Of `plan`.
  const Prediction& prediction() {
    if (!prediction_) prediction_ = play(plan, rates_, kSteps, Steps::to_steady, kForever);
    return *prediction_;
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
        const double shortest = worthwhile * step_seconds;
        const auto of_tried = play(tried, rates_, kSteps, Steps::time_alone, (1 + kSame) * shortest);
        if (of_tried && of_tried->step_seconds < shortest) {
          plan = std::move(tried);
          step_seconds = of_tried->step_seconds;
          prediction_.reset();
          return;
        }
      }
    } catch (const Exception&) {
      // It takes more memory than there is.
    }
    options_ = before;
  }

  const ComputeNeeds needs;
  SessionPlan plan;  // the fastest so far
  double step_seconds;
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
  const double computing = search.prediction().step.busy_seconds[static_cast<int>(swap::Lane::compute)];
  if (computing > kWorthwhile * search.step_seconds) return;
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
  const double without_swaps = search.step_seconds;
  choose_swaps(options, search);
  const double plain_updates = search.step_seconds;
  choose_updates(options, profile, search);
  Prediction prediction = search.prediction();
  return {.plan = std::move(search.plan),
          .prediction = std::move(prediction),
          .step_seconds_without_swaps = without_swaps,
          .step_seconds_plain_updates = plain_updates};
}

std::optional<double> step_seconds_unclipped(const ModelSpec& spec, SessionOptions options, const Profile& profile) {
  if (!options.clip) return std::nullopt;
  options.clip.reset();
  try {
    Search search(spec, options, profile);
    choose_updates(options, profile, search);
    return search.step_seconds;
  } catch (const Exception&) {
    return std::nullopt;
  }
}

}  // namespace tierflow

#include "runtime/planning/prediction.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>

#include "runtime/base/exception.h"
#include "runtime/planning/speculation.h"
#include "runtime/planning/store_cut.h"
#include "swap/planner.h"

namespace tierflow {

swap::Rates rates_of(const ModelSpec& spec, const Profile& profile) {
  return {.machine = profile.machine.rates,
          .update = profile.machine.update,
          .device_update = profile.machine.device_update,
          .stages = profile.model.seconds(spec)};
}

double least_on_drives(const SessionPlan& plan, const swap::MachineRates& machine) {
  const swap::Layout& layout = *plan.layout;
  const swap::Arrangement& at = plan.arrangement;
  // Every update reads the state that it writes, every gradient and item that is written is read.
  std::uint64_t written = plan.writes.step(), read = plan.writes.gradients + plan.writes.activations;
  std::vector<std::uint64_t> words(layout.units().size());  // by unit, on storage
  for (const swap::Chunk& chunk : layout.chunks()) {
    if (chunk.trainable && !at.stays(swap::ExtentKind::state, chunk.id)) read += chunk.state_bytes;
    if (!at.hi_resident[chunk.id]) words[chunk.unit] += chunk.word_bytes();
  }
  // Forward and backward each fetch the words of their units, but for those that the device still holds.
  const auto fetched = [&](const auto& visits) {
    std::vector<std::uint64_t> left = words;
    std::uint64_t bytes = 0;
    for (const swap::StageShape& stage : layout.stages())
      for (const int unit : stage.units)
        if (visits(stage)) bytes += std::exchange(left[unit], 0);
    return bytes - std::min(bytes, at.weight_ring);
  };
  read += fetched([](const swap::StageShape&) { return true; });
  read += fetched(
      [&](const swap::StageShape& stage) { return stage.backward_needs_weights && &stage != &layout.stages().back(); });
  // What waits in buffers when the step ends is written in the next one.
  written -= std::min(written, at.buffer_bytes(layout));
  if (plan.commit_every == 1) written += plan.writes.commit;
  return drive_seconds(machine, static_cast<double>(read), static_cast<double>(written));
}

namespace {

constexpr int kSteps = 4;
constexpr double kSame = 1e-9;  // of a step's time: as long as another one
constexpr double kForever = std::numeric_limits<double>::infinity();

bool moves_item(swap::TaskKind kind) {
  using enum swap::TaskKind;
  return kind == save_activations || kind == load_activations || kind == read_activations || kind == write_activations;
}

// A session's steps, one after the other.
class Clock {
 public:
  // updates: of all of them.
  Clock(const SessionPlan& plan, swap::Simulator& simulator, swap::Updates updates)
      : plan_(plan), planner_(*plan.layout, plan.arrangement), simulator_(simulator), updates_(updates) {
    simulator_.restart();
    simulator_.without_records();
    planner_.stream_parts_to([this](const swap::Plan& part) { append(part); });
  }
  Clock(const Clock&) = delete;

  // Plays the next one. number: 0 for a run's first; any other finds what a step before it left to do. False, and not
  // all of it played, where it takes longer than `longest`. records: whether its tasks leave some.
  bool step(int number, double longest, bool records) {
    begin_ = simulator_.now();
    computed_ = simulator_.computing();
    bytes_ = item_bytes_ = {};
    if (records) simulator_.record();
    const bool speculates = updates_ == swap::Updates::at_once;
    const bool pending = number > 0 && plan_.defers() && !speculates,
               commits = speculates || (number > 0 && plan_.commit_every == 1);
    append(planner_.train_step(pending, commits, updates_, expected_sparse_chunks(plan_, number, pending)));
    return simulator_.finish_updates(begin_ + longest);
  }
  // Of that step.
  double begin() const { return begin_; }
  double computing() const { return simulator_.computing() - computed_; }
  double seconds() const { return simulator_.now() - begin_; }
  const std::array<std::uint64_t, swap::kLanes>& bytes() const { return bytes_; }
  const std::array<std::uint64_t, swap::kLanes>& item_bytes() const { return item_bytes_; }
  std::vector<swap::TaskRecord> take_records() { return simulator_.take_records(); }

 private:
  void append(const swap::Plan& part) {
    for (const swap::Task& task : part.tasks) {
      bytes_[static_cast<int>(task.lane)] += task.bytes;
      if (moves_item(task.kind)) item_bytes_[static_cast<int>(task.lane)] += task.bytes;
    }
    simulator_.append(part);
  }

  const SessionPlan& plan_;
  swap::Planner planner_;
  swap::Simulator& simulator_;
  const swap::Updates updates_;
  double begin_ = 0, computed_ = 0;
  std::array<std::uint64_t, swap::kLanes> bytes_{}, item_bytes_{};
};

swap::Simulator simulator_of(const SessionPlan& plan, swap::Rates rates) {
  // Of the head's three products with its weights, the forward is one.
  if (plan.head_scores_first) rates.stages.back().head *= plan.references_too ? 5.0 / 3 : 4.0 / 3;
  for (swap::StageSeconds& stage : rates.stages)
    if (plan.references_too)
      for (double* seconds : {&stage.forward, &stage.forward_keeping, &stage.forward_swapping})
        *seconds += stage.evaluate;
  return {*plan.layout, std::move(rates)};
}

struct SteadyStep {
  int number = 0;
  double seconds = 0, computing = 0;
};

// The first step that takes as long as the one before, on a simulator of a plan with the same layout. Nothing where the
// second step, others like which follow, takes longer than `longest`.
std::optional<SteadyStep> steady_step(const SessionPlan& plan, swap::Simulator& simulator, double longest,
                                      swap::Updates updates = swap::Updates::as_arranged) {
  Clock clock(plan, simulator, updates);
  SteadyStep steady;
  for (int step = 0; step < kSteps; ++step) {
    if (!clock.step(step, step == 1 ? longest : kForever, /*records=*/false)) return std::nullopt;
    const double before = std::exchange(steady, {step, clock.seconds(), clock.computing()}).seconds;
    if (step > 1 && std::abs(steady.seconds - before) < kSame * before) break;
  }
  return steady;
}

enum class Records : std::uint8_t { all, of_last };  // which of them stay

// The first `steps` steps of a run, the last of which counts.
Prediction play(const SessionPlan& plan, swap::Simulator& simulator, int steps, Records records) {
  Clock clock(plan, simulator, swap::Updates::as_arranged);
  Prediction prediction;
  for (int step = 0; step < steps; ++step) {
    // What the last step finds unfinished of the one before leaves records too.
    clock.step(step, kForever, records == Records::all || step + 2 >= steps);
    std::vector<swap::TaskRecord> of_step = clock.take_records();
    if (records == Records::all) prediction.records.insert(prediction.records.end(), of_step.begin(), of_step.end());
    if (step + 1 < steps) continue;
    prediction.step_seconds = clock.seconds();
    prediction.bytes = clock.bytes();
    prediction.item_bytes = clock.item_bytes();
    for (swap::TaskRecord& record : of_step)
      record.begin = std::max(record.begin, clock.begin());  // the step before left writes
    prediction.step = swap::summarise(of_step);
  }
  return prediction;
}

}  // namespace

double forward_seconds(const SessionPlan& plan, const swap::Rates& rates) {
  swap::Simulator simulator(*plan.layout, rates);
  simulator.without_records();
  swap::Planner planner(*plan.layout, plan.arrangement);
  double before = 0, seconds = 0;
  for (int pass = 0; pass < 3; ++pass) {  // the first ones begin with an empty device
    simulator.append(planner.evaluate(plan.evaluated_at_once, true));
    simulator.drain();
    seconds = simulator.now() - std::exchange(before, simulator.now());
  }
  return seconds;
}

Prediction predict(const SessionPlan& plan, const swap::Rates& rates, int steps) {
  swap::Simulator simulator = simulator_of(plan, rates);
  return play(plan, simulator, steps, Records::all);
}

namespace {

// Tries settings of `options` one after the other and leaves it with the fastest.
class Search {
 public:
  // All outlive the search.
  Search(const ModelSpec& spec, SessionOptions& options, const Profile& profile)
      : needs(profile.model.needs(spec)),
        plan(plan_session(spec, options, needs)),
        options_(options),
        spec_(spec),
        machine_(profile.machine.rates),
        simulator_(simulator_of(plan, rates_of(spec, profile))),
        tried_{{plan.arrangement, plan.commit_every}} {
    step = *steady_step(plan, simulator_, kForever);
  }

  // Of `plan`.
  Prediction prediction() { return play(plan, simulator_, step.number + 1, Records::of_last); }

  // Sets what `settings` does where the step is then shorter than `worthwhile` of the shortest so far, and
  // accepts(plan, its seconds).
  template <class Settings, class Accepts>
  void attempt(double worthwhile, Settings settings, Accepts accepts) {
    const SessionOptions before = options_;
    settings(options_);
    try {
      SessionPlan tried = plan_again(plan, spec_, options_, needs);
      std::pair key{tried.arrangement, tried.commit_every};
      if (std::find(tried_.begin(), tried_.end(), key) == tried_.end()) {
        tried_.push_back(std::move(key));
        const double shortest = worthwhile * step.seconds, longest = (1 + kSame) * shortest;
        const bool may_be = least_on_drives(tried, machine_) <= longest;
        const auto of_tried = may_be ? steady_step(tried, simulator_, longest) : std::nullopt;
        if (of_tried && of_tried->seconds < shortest && accepts(tried, of_tried->seconds)) {
          plan = std::move(tried);
          step = *of_tried;
          return;
        }
      }
    } catch (const Exception&) {
      // It takes more memory than there is.
    }
    options_ = before;
  }

  template <class Settings>
  void attempt(double worthwhile, Settings settings) {
    attempt(worthwhile, settings, [](const SessionPlan&, double) { return true; });
  }

  // Of `plan`, a speculative step.
  double speculative_seconds() { return steady_step(plan, simulator_, kForever, swap::Updates::at_once)->seconds; }

  const ComputeNeeds needs;
  SessionPlan plan;  // the fastest so far
  SteadyStep step;   // of it

 private:
  SessionOptions& options_;
  const ModelSpec& spec_;
  const swap::MachineRates& machine_;
  swap::Simulator simulator_;
  std::vector<std::pair<swap::Arrangement, int>> tried_;  // and its commit_every: what a prediction depends on
};

void choose_swaps(const SessionOptions& options, Search& search) {
  constexpr int kShares = 4;
  constexpr double kWorthwhile = 0.99;
  // What a drive's wear is worth: so many times the part of a step's time that is saved, as a part of its writes.
  constexpr double kMoreWritten = 5;
  const swap::Arrangement& at = search.plan.arrangement;
  const int items = static_cast<int>(at.items.size());
  const auto computed_again = static_cast<int>(std::ranges::count_if(at.items, [&](const swap::Item& item) {
    return item.activations == swap::Activations::recompute && search.needs.swapped_bytes[item.made_by.stage] != 0;
  }));
  if (computed_again == 0) return;
  // The last share is all there are: the slots take memory in which activations were kept.
  const auto share = [&](int of) { return of == kShares ? items : computed_again * of / kShares; };
  const auto written = static_cast<double>(search.plan.writes.step());
  const double seconds = search.step.seconds;
  const auto worth_its_writes = [&](const SessionPlan& tried, double of_tried) {
    const double saved = 1 - of_tried / seconds;
    return static_cast<double>(tried.writes.step()) <= (1 + kMoreWritten * saved) * written;
  };
  // What the host has no room for goes to storage in both.
  for (int of = 1; of <= kShares; ++of)
    search.attempt(
        kWorthwhile, [&](SessionOptions& tried) { tried.swap_to_host = share(of); }, worth_its_writes);
  for (int of = 1; of <= kShares && !options.storage.empty(); ++of)
    search.attempt(
        kWorthwhile, [&](SessionOptions& tried) { tried.swap_to_storage = share(of); }, worth_its_writes);
}

void choose_updates(const SessionOptions& options, const Profile& profile, Search& search) {
  constexpr double kWorthwhile = 0.98;
  if (search.step.computing > kWorthwhile * search.step.seconds) return;
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

// Sets options.speculation and, in `placement`, why.
void choose_speculation(const ModelSpec& spec, SessionOptions& options, Search& search, Placement& placement) {
  constexpr double kWorthwhile = 0.98;
  placement.staged_because = why_staged(placement.plan, spec);
  if (!placement.staged_because.empty()) return;
  placement.step_seconds_speculative = search.speculative_seconds();
  if (*placement.step_seconds_speculative > kWorthwhile * placement.prediction.step_seconds) {
    placement.staged_because = "a speculative step is not faster";
    return;
  }
  options.speculation = Speculation::likely;
  placement.plan = plan_again(placement.plan, spec, options, search.needs);
}

}  // namespace

Placement choose_placement(const ModelSpec& spec, SessionOptions& options, const Profile& profile) {
  options.swap_to_host = options.swap_to_storage = 0;
  options.deferred_share = options.device_update_share = 0;
  options.speculation = Speculation::never;
  if (options.resume && options.chunk_elements != 0) {
    const auto plan_with = [&](std::uint64_t chunk_elements) {
      options.chunk_elements = chunk_elements;
      return plan_session(spec, options, profile.model.needs(spec));
    };
    options.chunk_elements =
        plan_to_resume(options.chunk_elements, options.host_memory, plan_with).layout->chunk_elements();
  }
  Search search(spec, options, profile);
  const double without_swaps = search.step.seconds;
  choose_swaps(options, search);
  const double plain_updates = search.step.seconds;
  choose_updates(options, profile, search);
  Placement placement{.plan = search.plan,
                      .prediction = search.prediction(),
                      .step_seconds_without_swaps = without_swaps,
                      .step_seconds_plain_updates = plain_updates};
  if (placement.plan.arrangement.staged) choose_speculation(spec, options, search, placement);
  return placement;
}

std::optional<double> step_seconds_unclipped(const ModelSpec& spec, SessionOptions options, const Profile& profile) {
  if (!options.clip) return std::nullopt;
  options.clip.reset();
  options.speculation = Speculation::never;
  try {
    Search search(spec, options, profile);
    choose_updates(options, profile, search);
    return search.step.seconds;
  } catch (const Exception&) {
    return std::nullopt;
  }
}

}  // namespace tierflow

#include "runtime/planning/correction.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "runtime/planning/repeat.h"

namespace tierflow {
namespace {

constexpr std::size_t kFewestSteps = 3;
constexpr double kContradicts = 1.0 / 6;  // of the measured step
constexpr int kRounds = 12;               // lanes share cores and drives: one changes what the others take
constexpr double kTooLittle = 0.02;       // of a step: a lane that is busy for less tells nothing
constexpr double kMostAtOnce = 2;         // by which a round changes a rate

// Everything that `lane` does takes `factor` times as long.
void slow_down(Profile& profile, swap::Lane lane, double factor) {
  swap::MachineRates& rates = profile.machine.rates;
  switch (lane) {
    case swap::Lane::disk_read:
      rates.disk_read /= factor;
      rates.disk_mixed /= std::sqrt(factor);
      return;
    case swap::Lane::disk_write:
      rates.disk_write /= factor;
      rates.disk_mixed /= std::sqrt(factor);
      return;
    case swap::Lane::upload:
      rates.upload /= factor;
      return;
    case swap::Lane::download:
      rates.download /= factor;
      rates.cast /= factor;
      return;
    case swap::Lane::compute:
      for (auto& [name, stage] : profile.model.stages) stage.seconds *= factor;
      return;
    case swap::Lane::update:
      rates.measure /= factor;
      for (auto* updates : {&profile.machine.update, &profile.machine.device_update})
        for (auto& [name, rate] : *updates) rate /= factor;
      return;
    case swap::Lane::commit:  // takes as long as the drives' flush, of which no rate is kept
      return;
  }
}

double error_of(double predicted, double took) {
  return std::abs(predicted / took - 1);
}

}  // namespace

Verdict judge(const ModelSpec& spec, const SessionPlan& plan, const Profile& profile,
              const std::vector<StepShown>& steps, double other_cores) {
  if (steps.size() < kFewestSteps) return {};
  const auto median = [&](auto of) {
    std::vector<double> values;
    for (const StepShown& step : steps) values.push_back(of(step));
    return reading_of(std::move(values));
  };
  const Reading step = median([](const StepShown& shown) { return shown.seconds; });
  const Prediction expected = predict(plan, rates_of(spec, profile));
  const double before = error_of(expected.step_seconds, step.seconds);
  if (before <= kContradicts) return {};
  const std::string said = fmt::format("predicted {:.3g} s a step, took {:.3g}: ", expected.step_seconds, step.seconds);

  const Readings run{.spread = step.spread, .other_cores = other_cores}, &machine = profile.machine.readings,
                                                                         &model = profile.model.readings;
  const int cores = profile.machine.rates.cores;
  if (!run.steady(cores)) {
    if (other_cores > std::max(machine.other_cores, model.other_cores))
      return {.corrected = {},
              .line = said +
                      fmt::format("other programs took {:.1f} of the {} cores; the profile stays", other_cores, cores)};
    if (step.spread > std::max(machine.spread, model.spread))
      return {.corrected = {},
              .line = said + fmt::format("the steps lay {:.0f}% apart; the profile stays", 100 * step.spread)};
  }

  Profile now = profile;
  std::array<double, swap::kLanes> changed;
  changed.fill(1);
  for (int round = 0; round < kRounds; ++round) {
    const Prediction prediction = predict(plan, rates_of(spec, now));
    for (int lane = 0; lane < swap::kLanes; ++lane) {
      const double predicted = prediction.step.busy_seconds[lane],
                   took = median([&](const StepShown&shown) { return shown.busy_seconds[lane]; }).seconds;
      if (std::min(predicted, took) <= 0 || std::max(predicted, took) < kTooLittle * step.seconds) continue;
      const double factor = std::clamp(took / predicted, 1 / kMostAtOnce, kMostAtOnce);
      slow_down(now, static_cast<swap::Lane>(lane), factor);
      changed[lane] *= factor;
    }
  }
  if (error_of(predict(plan, rates_of(spec, now)).step_seconds, step.seconds) > before / 2)
    return {.corrected = {},
            .line = said +
                    "no lane's rate explains it; the profile stays, `tierflow plan --refresh-profile` measures anew"};
  now.machine.readings = now.model.readings = {.spread = run.spread, .other_cores = run.other_cores, .corrected = true};
  std::string what;
  for (int lane = 0; lane < swap::kLanes; ++lane)
    if (std::abs(std::log(changed[lane])) > std::log(1.1))
      what += fmt::format("{}{} {:.2g} times as long", what.empty() ? "" : ", ",
                          swap::lane_name(static_cast<swap::Lane>(lane)), changed[lane]);
  return {.corrected = std::move(now), .line = said + "the profile is corrected (" + what + ")"};
}

}  // namespace tierflow

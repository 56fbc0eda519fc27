#include "runtime/program/plan_command.h"

#include <fmt/format.h>

#include <future>
#include <iostream>
#include <nlohmann/json.hpp>
#include <set>

#include "runtime/base/exception.h"
#include "runtime/base/machine.h"
#include "runtime/data/teacher_file.h"
#include "runtime/planning/machine_model.h"
#include "runtime/program/loss_options.h"
#include "runtime/program/plan_report.h"
#include "runtime/program/sample_prompts.h"
#include "runtime/program/train_library.h"
#include "runtime/program/training_spec.h"

namespace tierflow {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

// From the cache, and what that lacks by measuring. `refreshed` was measured in this very command, whatever is asked
// for.
Profile profile_of(const ModelSpec& spec, const SessionOptions& session, bool refresh,
                   std::optional<MachineProfile> refreshed, const std::function<void(const ProfileJob&)>& measure,
                   const Say& say) {
  const ProfileCache cache(spec, session, train_build(), say);
  std::optional<MachineProfile> machine = std::move(refreshed);
  std::optional<ModelProfile> model;
  if (!refresh) {
    if (!machine) machine = cache.machine();
    model = cache.model();
  }
  // A run takes less time to measure than a plan does: what it had to scale and no step has corrected since is measured
  // again.
  const auto enough = [&] {
    return model->covers(spec) &&
           (model->width == 1 || model->readings.corrected || model->seconds_allowed >= kProfileSeconds);
  };
  const bool has_machine = machine.has_value(), has_model = model.has_value() && enough();
  if (!has_machine) machine.emplace();
  if (!has_model) model.emplace();
  if (!has_machine || !has_model)
    measure({.spec = spec,
             .options = session,
             .machine = has_machine ? nullptr : &*machine,
             .model = has_model ? nullptr : &*model,
             .say = say});
  if (!has_machine) cache.keep(*machine);
  if (!has_model) cache.keep(*model);
  return {*std::move(machine), *std::move(model)};
}

// A run with its session's options complete, and what is expected of it.
struct Planned {
  SessionOptions session;
  Profile profile;
  Placement placement;
};

// Full tuning with the same budgets, where these allow it; its stages take what those of `spec` do.
std::optional<TuningCost> full_tuning(const PlanOptions& options, const ModelSpec& spec, const Planned& planned) {
  if (options.method != "galore") return std::nullopt;
  PlanOptions full = options;
  full.method = "full";
  try {
    const SessionPlan plan = plan_that_fits(training_spec(full), planned.session, planned.profile.model.needs(spec));
    return tuning_cost(plan, predict(plan, rates_of(spec, planned.profile)));
  } catch (const Exception& refused) {
    if (refused.error().kind != io::ErrorKind::usage) throw;
    return std::nullopt;
  }
}

// Of the pass that computes the reference before the first step, where one does.
std::optional<double> reference_rate(const PlanOptions& options, const ModelSpec& spec, const Planned& planned) {
  const LossRule& rule = planned.session.loss;
  if (!rule.needs_reference() || rule.computes_reference()) return std::nullopt;
  const SessionPlan& plan = planned.placement.plan;
  return static_cast<double>(plan.evaluated_at_once * planned.session.micro_batch / sequences_in_one(options)) /
         forward_seconds(plan, rates_of(spec, planned.profile));
}

class Planning {
 public:
  // modelled: a machine that is not here; nothing: this one.
  Planning(const PlanOptions& options, const ModelSpec& spec, const std::optional<MachineModel>& modelled,
           const std::function<void(const ProfileJob&)>& measure, const Say& say)
      : options_(options),
        spec_(spec),
        modelled_(modelled),
        measure_(measure),
        say_(say),
        session_(modelled ? train_settings(options, *modelled, say) : train_settings(options, 0, say)) {
    session_.loss.base_is_reference = base_is_reference(options, spec);
    if (!options.distill.empty()) teacher_top_ = TeacherFile(options.distill).shape().top;
    sample_prompts_.emplace(options, spec);
  }

  Planned plan(std::int64_t micro_batch, int micro_batches) {
    SessionOptions session = session_;
    session.micro_batch = micro_batch * sequences_in_one(options_);
    session.micro_batches = micro_batches;
    Profile profile = modelled_ ? Profile{machine_profile(*modelled_), model_profile(spec_, session, *modelled_)}
                                : profile_of(spec_, session, options_.refresh_profile, machine_, measure_, say_);
    machine_ = profile.machine;  // the same for every shape
    // What a teacher's tokens take: another run may have measured the stages without them.
    profile.model.micro_batch_bytes += static_cast<std::uint64_t>(session.micro_batch * session.sequence_length) *
                                       teacher_top_ * (sizeof(std::int32_t) + sizeof(std::uint16_t));
    sample_prompts_->set_aside(session, spec_, say_);
    if (options_.device_memory == 0) session.device_memory += profile.model.device_fixed;  // as train adds it
    Placement placement = choose_placement(spec_, session, profile);
    return {std::move(session), std::move(profile), std::move(placement)};
  }

  // The micro-batches of `tokens` a step with the most tokens a second; `shapes` is told of each.
  Planned fastest(std::int64_t tokens, Json& shapes) {
    const std::int64_t length = session_.sequence_length * sequences_in_one(options_), sequences = tokens / length;
    if (sequences < 1)
      fail_usage(fmt::format("--tokens-per-step {} is less than one {} of {} tokens", tokens,
                             sequences_in_one(options_) == 1 ? "sequence" : "pair", length));
    std::optional<Planned> best;
    std::optional<Exception> refused;
    for (std::int64_t micro_batch = 1, before = 0; micro_batch <= sequences; ++micro_batch) {
      if (sequences % micro_batch != 0 || 2 * micro_batch < 3 * before) continue;
      before = micro_batch;
      Json shape{{"micro_batch", micro_batch}, {"micro_batches", sequences / micro_batch}};
      try {
        Planned planned = plan(micro_batch, static_cast<int>(sequences / micro_batch));
        const double step_seconds = planned.placement.prediction.step_seconds;
        shape["step_s"] = step_seconds;
        shape["tokens_per_s"] = static_cast<double>(sequences * length) / step_seconds;
        shape["refused"] = nullptr;
        if (!best || step_seconds < best->placement.prediction.step_seconds) best = std::move(planned);
      } catch (const Exception& error) {
        if (error.error().kind != io::ErrorKind::usage) throw;
        shape["refused"] = error.what();
        if (!refused) refused = error;
      }
      shapes.push_back(shape);
      if (best && !shape["refused"].is_null()) break;  // larger ones need more memory
    }
    if (!best) throw *refused;
    return *std::move(best);
  }

  Planned as_given() { return plan(options_.micro_batch, static_cast<int>(options_.micro_batches)); }

 private:
  const PlanOptions& options_;
  const ModelSpec& spec_;
  const std::optional<MachineModel>& modelled_;
  const std::function<void(const ProfileJob&)>& measure_;
  const Say& say_;
  SessionOptions session_;
  std::optional<MachineProfile> machine_;
  std::uint64_t teacher_top_ = 0;  // tokens that a teacher named for each position
  std::optional<SamplePrompts> sample_prompts_;
};

// What the storage folders have room for, each drive counted once.
std::uint64_t free_on(const std::vector<fs::path>& folders) {
  std::uint64_t sum = 0;
  std::set<std::pair<std::uintmax_t, std::uintmax_t>> seen;
  for (fs::path folder : folders) {
    std::error_code error;
    folder = fs::absolute(folder, error).lexically_normal();
    while (!fs::exists(folder, error) && folder.has_relative_path()) folder = folder.parent_path();
    const fs::space_info space = fs::space(folder, error);
    if (!error && seen.insert({space.capacity, space.available}).second) sum += space.available;
  }
  return sum;
}

}  // namespace

int run_plan(const PlanOptions& options, const std::function<void(const ProfileJob&)>& measure) {
  const Say say = [](const std::string& line) { std::cerr << line << std::endl; };
  const ModelSpec spec = training_spec(options);
  const std::optional<MachineModel> modelled =
      options.machine.empty() ? std::nullopt : std::optional(find_machine(options.machine));
  Planning planning(options, spec, modelled, measure, say);
  Json shapes = Json::array();
  const Planned planned =
      options.tokens_per_step != 0 ? planning.fastest(options.tokens_per_step, shapes) : planning.as_given();
  // Beside the proof: each takes a core for a part of a second.
  std::future<std::optional<double>> unclipped =
      std::async(std::launch::async, [&] { return step_seconds_unclipped(spec, planned.session, planned.profile); });
  prove(planned.placement.plan, /*train=*/true);
  if (!options.trace.empty()) {
    const Prediction steps = predict(planned.placement.plan, rates_of(spec, planned.profile));
    const swap::NamedTimeline predicted[] = {{"predicted", steps.records}};
    throw_if(swap::write_trace(options.trace, predicted));
  }
  Json report = plan_json({.options = options,
                           .spec = spec,
                           .session = planned.session,
                           .profile = planned.profile,
                           .placement = planned.placement,
                           .modelled = modelled ? &*modelled : nullptr,
                           .full = full_tuning(options, spec, planned),
                           .reference_pairs_per_second = reference_rate(options, spec, planned),
                           .step_seconds_unclipped = unclipped.get()});
  report["step_shapes"] = shapes;
  const std::uint64_t needed = report["storage"]["bytes"],
                      free = modelled ? UINT64_MAX : free_on(planned.session.storage);
  report["storage"]["free"] = modelled ? Json() : Json(free);
  std::cout << (options.json ? report.dump() + "\n" : plan_text(report)) << std::flush;
  if (needed > free)
    fail(io::ErrorKind::environment, "--storage",
         fmt::format("needs {} and {} are free there: free some, or name further drives", human_bytes(needed),
                     human_bytes(free)));
  return 0;
}

}  // namespace tierflow

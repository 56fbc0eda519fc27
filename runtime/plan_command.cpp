#include "runtime/plan_command.h"

#include <fmt/format.h>

#include <iostream>
#include <nlohmann/json.hpp>
#include <set>

#include "runtime/exception.h"
#include "runtime/machine.h"
#include "runtime/plan_report.h"

namespace tierflow {
namespace {

namespace fs = std::filesystem;

struct Profile {
  MachineProfile machine;
  ModelProfile model;
};

// From the cache, and what that lacks by measuring.
Profile profile_of(const ModelSpec& spec, const SessionOptions& session, bool refresh,
                   const std::function<void(const ProfileJob&)>& measure, const Say& say) {
  const ProfileCache cache(spec, session, train_build(), say);
  std::optional<MachineProfile> machine;
  std::optional<ModelProfile> model;
  if (!refresh) {
    machine = cache.machine();
    model = cache.model();
  }
  const bool has_machine = machine.has_value(), has_model = model.has_value() && model->covers(spec);
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

std::optional<double> step_seconds_unclipped(const ModelSpec& spec, SessionOptions session, const Profile& profile) {
  if (!session.clip) return std::nullopt;
  session.clip.reset();
  try {
    return choose_updates(spec, session, profile.machine, profile.model).step_seconds;
  } catch (const Exception&) {
    return std::nullopt;  // it takes other budgets
  }
}

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
  SessionOptions session = train_settings(options, 0, say);
  const Profile profile = profile_of(spec, session, options.refresh_profile, measure, say);
  if (options.device_memory == 0) session.device_memory += profile.model.device_fixed;  // as train adds it
  const UpdateChoice updates = choose_updates(spec, session, profile.machine, profile.model);
  session.deferred_share = updates.deferred_share;
  session.device_update_share = updates.device_share;
  const SessionPlan plan = plan_session(spec, session, profile.model.needs(spec));
  prove(plan, /*train=*/true);
  const Prediction prediction = predict(plan, rates_of(spec, plan, profile.machine, profile.model));
  if (!options.trace.empty()) {
    const swap::NamedTimeline predicted[] = {{"predicted", prediction.records}};
    throw_if(swap::write_trace(options.trace, predicted));
  }
  nlohmann::ordered_json report = plan_json({.options = options,
                                             .spec = spec,
                                             .session = session,
                                             .plan = plan,
                                             .machine = profile.machine,
                                             .model = profile.model,
                                             .prediction = prediction,
                                             .step_seconds_unclipped = step_seconds_unclipped(spec, session, profile),
                                             .step_seconds_plain = updates.step_seconds_plain});
  const std::uint64_t needed = report["storage"]["bytes"], free = free_on(session.storage);
  report["storage"]["free"] = free;
  std::cout << (options.json ? report.dump() + "\n" : plan_text(report)) << std::flush;
  if (needed > free)
    fail(io::ErrorKind::environment, "--storage",
         fmt::format("needs {} and {} are free there: free some, or name further drives", human_bytes(needed),
                     human_bytes(free)));
  return 0;
}

}  // namespace tierflow

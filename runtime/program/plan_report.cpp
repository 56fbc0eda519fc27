#include "runtime/program/plan_report.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>

#include "runtime/planning/break_even.h"
#include "runtime/planning/reference_file.h"
#include "runtime/spec/active_parameters.h"
#include "runtime/spec/adapters.h"
#include "swap/store.h"

namespace tierflow {
namespace {

using Json = nlohmann::ordered_json;

// "layers.12.mlp" -> "layers.*.mlp": what is alike in all layers of a kind.
std::string kind_of(const std::string& unit) {
  std::string kind;
  for (const char c : unit) {
    if (c < '0' || c > '9')
      kind += c;
    else if (!kind.ends_with('*'))
      kind += '*';
  }
  return kind;
}

// A row for each kind of layer and format of its state.
Json layers_json(const PackedModel& packed) {
  Json rows = Json::array();
  for (const PackedUnit& unit : packed.units) {
    std::uint64_t begin = 0;
    for (const swap::GroupShape& group : unit.shape.groups) {
      const std::uint64_t end = begin + group.elements;
      std::uint64_t parameters = 0;
      for (const PackedTensor& tensor : unit.tensors)
        if (tensor.offset >= begin && tensor.offset < end) parameters += tensor.elements;
      begin = end;
      const std::string kind = kind_of(unit.shape.name);
      auto row = std::find_if(rows.begin(), rows.end(), [&](const Json& other) {
        return other["layers"] == kind && other["precision"] == group.precision;
      });
      if (row == rows.end()) {
        rows.push_back(
            {{"layers", kind}, {"units", 0}, {"precision", group.precision}, {"parameters", 0}, {"bytes", 0}});
        row = std::prev(rows.end());
      }
      const std::uint64_t bytes = 2 * group.elements + group.state_bytes(group.elements);
      (*row)["units"] = (*row)["units"].get<int>() + 1;
      (*row)["parameters"] = (*row)["parameters"].get<std::uint64_t>() + parameters;
      (*row)["bytes"] = (*row)["bytes"].get<std::uint64_t>() + bytes;
    }
  }
  return rows;
}

// Parameters that keep 32-bit moments under a policy of 8-bit ones, and what that costs.
Json moments_32_json(const PackedModel& packed) {
  std::uint64_t elements = 0;
  if (packed.precision != Precision::fp32_master_adam32)
    for (const PackedUnit& unit : packed.units)
      for (std::size_t group = 0; group < unit.formats.size(); ++group)
        if (unit.formats[group].moments == optim::MomentFormat::f32 && unit.shape.groups[group].trainable)
          elements += unit.shape.groups[group].elements;
  return {{"parameters", elements}, {"extra_bytes", elements * 6 - elements / 256 * 8}};
}

double share(const std::vector<bool>& resident, const swap::Layout& layout) {
  double kept = 0, all = 0;
  for (std::size_t id = 0; id < resident.size(); ++id) {
    const auto elements = static_cast<double>(layout.chunks()[id].elements);
    all += elements;
    if (resident[id]) kept += elements;
  }
  return all == 0 ? 0 : kept / all;
}

std::uint64_t inputs_that_stay(const SessionPlan& plan) {
  std::uint64_t bytes = 0;
  for (const swap::Item& item : plan.arrangement.items)
    if (item.input_bytes == 0) bytes += plan.layout->stages()[item.made_by.stage].carry_bytes;
  return bytes;
}

// Of the items that keep theirs.
std::uint64_t kept_activations(const SessionPlan& plan, const ComputeNeeds& needs) {
  std::uint64_t bytes = 0;
  for (const swap::Item& item : plan.arrangement.items)
    if (item.activations == swap::Activations::keep) bytes += needs.activation_bytes[item.made_by.stage];
  return bytes;
}

struct WaitingGradients {
  std::uint64_t in_memory = 0, on_storage = 0, on_device = 0;  // bytes
};

// Those of deferred updates.
WaitingGradients waiting_gradients(const SessionPlan& plan) {
  WaitingGradients waiting;
  for (std::size_t id = 0; id < plan.layout->chunks().size(); ++id)
    if (plan.arrangement.deferred[id])
      (plan.arrangement.device_place(swap::ExtentKind::gradient, static_cast<int>(id)) != swap::kNowhere
           ? waiting.on_device
       : plan.arrangement.gradient_resident[id] ? waiting.in_memory
                                                : waiting.on_storage) += plan.layout->chunks()[id].word_bytes();
  return waiting;
}

double of_trainable(const SessionPlan& plan, std::uint64_t parameters) {
  return static_cast<double>(parameters) /
         static_cast<double>(std::max<std::uint64_t>(1, plan.packed.trainable_parameters));
}

// Which updates wait for the next forward and which run on the device, and a step's time if none did that need not.
Json updates_json(const PlannedRun& run) {
  const SessionPlan& plan = run.placement.plan;
  const WaitingGradients waiting = waiting_gradients(plan);
  return {{"deferred_share", of_trainable(plan, plan.deferred_parameters)},
          {"device_share", of_trainable(plan, plan.device_updated_parameters)},
          {"gradients_in_memory", waiting.in_memory},
          {"gradients_on_storage", waiting.on_storage},
          {"gradients_on_device", waiting.on_device},
          {"embedding_parts_in_a_step", plan.sparse_used},
          {"embedding_parts", plan.layout->sparse_chunks().size()},
          {"step_s_plain", run.placement.step_seconds_plain_updates}};
}

// What becomes of the activations of each micro-batch in each block or half of one.
Json activations_json(const PlannedRun& run) {
  const swap::Arrangement& at = run.placement.plan.arrangement;
  int kept = 0, host = 0, storage = 0, again = 0;
  for (const swap::Item& item : at.items) {
    const StageKind kind = run.spec.stages[item.made_by.stage].kind;
    if (kind != StageKind::block && kind != StageKind::attention && kind != StageKind::mlp &&
        kind != StageKind::experts)
      continue;
    ++(item.activations == swap::Activations::keep        ? kept
       : item.activations == swap::Activations::recompute ? again
       : item.on_storage                                  ? storage
                                                          : host);
  }
  return {{"kept", kept},
          {"swapped_to_host", host},
          {"swapped_to_storage", storage},
          {"recomputed", again},
          {"layers_whose_input_leaves", at.inputs_that_leave()},
          {"bytes_to_host", at.saved_on_host()},
          {"bytes_to_storage", run.placement.plan.writes.activations},
          {"step_s_without_swapping", run.placement.step_seconds_without_swaps}};
}

Json storage_json(const PlannedRun& run) {
  std::uint64_t weights = 0, state = 0, second = 0, activations = 0;
  const SessionPlan& plan = run.placement.plan;
  const swap::StoreOptions options = store_options(run.spec, run.session, plan);
  if (plan.stored) {
    for (const swap::Chunk& chunk : plan.layout->chunks()) {
      weights += chunk.word_bytes();
      state += chunk.state_bytes;
      if (chunk.trainable && options.generations == 2) second += chunk.word_bytes() + chunk.state_bytes;
    }
    for (const std::uint64_t item : plan.arrangement.stored_activations()) activations += item;
  }
  const std::uint64_t bytes = plan.stored ? swap::Store::bytes_needed(options, *plan.layout) : 0;
  const std::uint64_t samples = plan.cache.storage;
  return {{"bytes", bytes + samples},
          {"generations", options.generations},
          {"weights", weights},
          {"state", state},
          {"second_generation", second},
          {"staged_gradients", waiting_gradients(plan).on_storage},
          {"activations", activations},
          {"keys_and_values", samples},
          {"bytes_per_parameter", static_cast<double>(bytes) / static_cast<double>(run.spec.parameters())}};
}

Json cost_json(const TuningCost& cost) {
  return {{"state", cost.state},
          {"read_per_step", cost.read},
          {"written_per_step", cost.written},
          {"gradients_per_step", cost.gradients}};
}

// What projected gradients spare, beside full tuning; null where none are projected.
Json galore_json(const PlannedRun& run) {
  const std::int64_t steps = window_steps(run.spec);
  if (steps == 0) return nullptr;
  std::uint64_t projected = 0, trained = 0, projectors = 0;
  for (const UnitSpec& unit : run.spec.units)
    for (const TensorSpec& tensor : unit.tensors) {
      const auto elements = static_cast<std::uint64_t>(tensor.elements());
      if (is_adapter(tensor)) (tensor.trainable ? trained : projectors) += elements;
      if (tensor.rewritten == Rewritten::master) projected += elements;
    }
  const SessionPlan& plan = run.placement.plan;
  Json json{{"update_gap", steps},
            {"projected_parameters", projected},
            {"trained_in_their_place", trained},
            {"projector_parameters", projectors},
            {"base_written_per_step", 0},
            {"written_per_window", plan.writes.window + plan.writes.step()}};
  json.update(cost_json(tuning_cost(plan, run.placement.prediction)));
  json["full"] = run.full ? cost_json(*run.full) : Json();
  return json;
}

// How the reference of preference pairs comes to be; null where the loss has none.
Json reference_json(const PlannedRun& run) {
  if (!run.session.loss.needs_reference()) return nullptr;
  const bool before = run.reference_pairs_per_second.has_value();
  return {{"computed", before ? "before the first step" : "in the visits of each step"},
          {"pairs_per_s", before ? Json(*run.reference_pairs_per_second) : Json()},
          {"host_bytes_per_pair", before ? kReferenceRam : 0},
          {"storage_bytes_per_pair", before ? kReferenceFile : 0}};
}

Json clip_json(const PlannedRun& run) {
  const Placement& placement = run.placement;
  const bool staged = placement.plan.arrangement.staged;
  const WaitingGradients waiting = staged ? waiting_gradients(placement.plan) : WaitingGradients{};
  const auto or_null = [](const std::optional<double>& seconds) { return seconds ? Json(*seconds) : Json(); };
  return {{"norm", run.session.clip ? Json(*run.session.clip) : Json("none")},
          {"staged", staged},
          {"gradients_in_memory", waiting.in_memory},
          {"gradients_on_storage", waiting.on_storage},
          {"gradients_on_device", waiting.on_device},
          {"extra_read", waiting.on_storage},
          {"extra_written", waiting.on_storage},
          {"step_s_without", or_null(run.step_seconds_unclipped)},
          {"step_s_speculative", or_null(placement.step_seconds_speculative)},
          {"speculates", placement.plan.speculates},
          {"staged_because", placement.staged_because.empty() ? Json() : Json(placement.staged_because)}};
}

// From which step on compute is the limit; null where it never is.
Json break_even_json(const PlannedRun& run, std::int64_t micro_batch_tokens) {
  const auto found = break_even(run.placement.plan, run.placement.prediction, rates_of(run.spec, run.profile));
  if (!found) return nullptr;
  return {{"tokens", found->micro_batches * micro_batch_tokens},
          {"micro_batches", found->micro_batches},
          {"hidden_last", found->last == swap::Lane::compute ? Json() : Json(swap::lane_name(found->last))}};
}

Json step_json(const PlannedRun& run) {
  const Prediction& prediction = run.placement.prediction;
  const auto micro_batch_tokens = run.session.micro_batch * run.session.sequence_length;
  const auto tokens = micro_batch_tokens * run.session.micro_batches;
  Json lanes;
  int busiest = 0;
  for (int lane = 0; lane < swap::kLanes; ++lane) {
    lanes[swap::lane_name(static_cast<swap::Lane>(lane))] = {{"bytes", prediction.bytes[lane]},
                                                             {"busy_s", prediction.step.busy_seconds[lane]}};
    if (prediction.step.busy_seconds[lane] > prediction.step.busy_seconds[busiest]) busiest = lane;
  }
  double waited = 0;
  Json stalls = Json::object();
  for (const auto& [cause, seconds] : prediction.step.stalled_by_cause()) {
    stalls[cause] = seconds;
    waited += seconds;
  }
  return {{"tokens", tokens},
          {"step_s", prediction.step_seconds},
          {"tokens_per_s", static_cast<double>(tokens) / prediction.step_seconds},
          {"lanes", lanes},
          {"limit", swap::lane_name(static_cast<swap::Lane>(busiest))},
          {"break_even", break_even_json(run, micro_batch_tokens)},
          {"compute_waits_s", waited},
          {"stalls", stalls}};
}

constexpr const char* kComputed = "computed from published rates, not measured";

// How far the numbers can be trusted.
Json profile_json(const Profile& profile, const MachineModel* modelled) {
  const std::string doubt = modelled != nullptr ? kComputed : doubt_of(profile);
  return {{"machine", to_json(profile.machine.readings)},
          {"stages", to_json(profile.model.readings)},
          {"scaled_from_width", profile.model.width < 1 ? Json(profile.model.width) : Json()},
          {"doubt", doubt.empty() ? Json() : Json(doubt)}};
}

// A machine that is not here, with where each number is from; null for this one.
Json modelled_json(const MachineModel* machine) {
  if (machine == nullptr) return nullptr;
  Json figures = Json::array();
  for (const auto& [name, figure] : machine->figures())
    figures.push_back({{"name", name}, {"value", figure.value}, {"source", figure.source}});
  return {{"name", machine->name}, {"drives", machine->drives}, {"figures", figures}, {"note", kComputed}};
}

}  // namespace

TuningCost tuning_cost(const SessionPlan& plan, const Prediction& prediction) {
  TuningCost found{.read = prediction.bytes[static_cast<std::size_t>(swap::Lane::disk_read)],
                   .written = prediction.bytes[static_cast<std::size_t>(swap::Lane::disk_write)]};
  for (const swap::Chunk& chunk : plan.layout->chunks()) {
    found.state += chunk.word_bytes() + chunk.state_bytes;
    if (chunk.trainable) found.gradients += chunk.word_bytes();
  }
  return found;
}

PredictedMemory predicted_memory(const SessionPlan& plan, const SessionOptions& session, const ModelSpec& spec,
                                 const ModelProfile& model) {
  PredictedMemory memory;
  const ComputeNeeds needs = model.needs(spec);
  memory.device = plan.arrangement.device_bytes() + model.device_fixed + needs.expected(plan.arrangement) +
                  inputs_that_stay(plan) + kept_activations(plan, needs);
  memory.device =
      std::min(memory.device, session.device_memory);  // torch gives back what it keeps before it takes more
  memory.host = plan.host_bytes();
  memory.process = model.process_bytes + memory.host + (session.device == "cuda" ? 0 : memory.device);
  return memory;
}

Json plan_json(const PlannedRun& run) {
  const SessionPlan& plan = run.placement.plan;
  const swap::Arrangement& at = plan.arrangement;
  const swap::Layout& layout = *plan.layout;
  std::size_t tiles = 0, halves = 0;
  for (const StageSpec& stage : run.spec.stages) {
    tiles += stage.kind == StageKind::head_tile ? 1 : 0;
    halves += stage.kind == StageKind::attention ? 1 : 0;
  }
  const PredictedMemory memory = predicted_memory(plan, run.session, run.spec, run.profile.model);
  const auto in_a_step = static_cast<double>(plan.writes.step());
  const std::int64_t window = window_steps(run.spec);
  const double written =
      1e-12 * (in_a_step +
               (window == 0 ? 0 : (in_a_step + static_cast<double>(plan.writes.window)) / static_cast<double>(window)));
  std::vector<std::string> folders;
  for (const auto& folder : run.session.storage) folders.push_back(folder.string());
  Json storage = storage_json(run);
  storage["folders"] = folders;
  return {{"model",
           {{"architecture", run.spec.config.architecture},
            {"family", run.spec.config.model_type},
            {"parameters", run.spec.parameters()},
            {"active_parameters", active_parameters(run.spec)},
            {"experts", run.spec.config.experts.count},
            {"units", run.spec.units.size()},
            {"stages", run.spec.stages.size()},
            {"vocabulary_tiles", tiles == 0 ? 1 : tiles + 1},
            {"blocks_in_halves", halves},
            {"chunks", layout.chunks().size()}}},
          {"precision",
           {{"policy", precision_name(run.session.precision)},
            {"layers", layers_json(plan.packed)},
            {"moments_32", moments_32_json(plan.packed)}}},
          {"storage", storage},
          {"host",
           {{"budget", run.session.host_memory},
            {"used", plan.host_bytes()},
            {"loading", plan.loading},
            {"exporting", plan.exporting},
            {"buffers", at.buffer_bytes(layout)},
            {"resident", at.resident_bytes(layout)},
            {"activations", at.saved_on_host()},
            {"keys_and_values", plan.cache.host},
            {"weights_resident", share(at.hi_resident, layout)},
            {"state_resident", share(at.state_resident, layout)},
            {"gradients_resident", at.staged ? share(at.gradient_resident, layout) : 0.0}}},
          {"device",
           {{"name", run.session.device},
            {"budget", run.session.device_memory},
            {"weights", at.weight_ring},
            {"gradients", at.gradient_ring + at.held_gradients},
            {"activations", inputs_that_stay(plan) + at.slots * at.slot_bytes +
                                kept_activations(plan, run.profile.model.needs(run.spec))},
            {"state", at.device_resident},
            {"state_share", of_trainable(plan, plan.device_state_parameters)},
            {"workspace", plan.workspace}}},
          {"activations", activations_json(run)},
          {"clip", clip_json(run)},
          {"updates", updates_json(run)},
          {"galore", galore_json(run)},
          {"reference", reference_json(run)},
          {"step", step_json(run)},
          {"wear",
           {{"tb_written_per_step", written},
            {"tb_written_per_day", written * 86400 / run.placement.prediction.step_seconds}}},
          {"memory", {{"device_peak", memory.device}, {"host", memory.host}, {"process_peak", memory.process}}},
          {"machine", rates_json(run.profile.machine)},
          {"profile", profile_json(run.profile, run.modelled)},
          {"modelled", modelled_json(run.modelled)},
          {"checked", true}};
}

}  // namespace tierflow

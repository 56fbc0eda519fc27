#include "runtime/plan_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "runtime/machine.h"
#include "swap/store.h"

namespace tierflow {
namespace {

using Json = nlohmann::ordered_json;

std::string name_of(Family family) {
  return family == Family::gpt2 ? "gpt2" : family == Family::opt ? "opt" : "llama";
}

// "layers.12.mlp" -> "layers.*.mlp": what is alike in all layers of a kind.
std::string kind_of(const std::string& unit) {
  std::string kind;
  for (const char c : unit) {
    const bool digit = c >= '0' && c <= '9';
    if (!digit) kind += c;
    if (digit && (kind.empty() || kind.back() != '*')) kind += '*';
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
      const std::uint64_t bytes = 2 * group.elements + (unit.shape.trainable ? group.state_bytes(group.elements) : 0);
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
        if (unit.formats[group].moments == optim::MomentFormat::f32 && unit.shape.trainable)
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

std::uint64_t kept_carries(const SessionPlan& plan) {
  std::uint64_t bytes = 0;
  for (std::size_t stage = 1; stage + 1 < plan.layout->stages().size(); ++stage)
    if (!plan.arrangement.carry_on_host[stage])
      bytes += plan.layout->stages()[stage].carry_bytes * plan.arrangement.micro_batches;
  return bytes;
}

// Of the stages that keep theirs.
std::uint64_t kept_activations(const SessionPlan& plan, const ComputeNeeds& needs) {
  std::uint64_t bytes = 0;
  for (std::size_t stage = 0; stage < plan.arrangement.keeps.size(); ++stage)
    if (plan.arrangement.keeps[stage]) bytes += needs.activation_bytes[stage] * plan.arrangement.micro_batches;
  return bytes;
}

struct WaitingGradients {
  std::uint64_t in_memory = 0, on_storage = 0;  // bytes
};

// Those of deferred updates.
WaitingGradients waiting_gradients(const SessionPlan& plan) {
  WaitingGradients waiting;
  for (std::size_t id = 0; id < plan.layout->chunks().size(); ++id)
    if (plan.arrangement.deferred[id])
      (plan.arrangement.gradient_resident[id] ? waiting.in_memory : waiting.on_storage) +=
          plan.layout->chunks()[id].word_bytes();
  return waiting;
}

// Which updates wait for the next forward and which run on the device, and a step's time if none did that need not.
Json updates_json(const PlannedRun& run) {
  const WaitingGradients waiting = waiting_gradients(run.plan);
  const auto share = [&](std::uint64_t parameters) {
    return static_cast<double>(parameters) /
           static_cast<double>(std::max<std::uint64_t>(1, run.plan.packed.trainable_parameters));
  };
  return {{"deferred_share", share(run.plan.deferred_parameters)},
          {"device_share", share(run.plan.device_updated_parameters)},
          {"gradients_in_memory", waiting.in_memory},
          {"gradients_on_storage", waiting.on_storage},
          {"step_s_plain", run.step_seconds_plain}};
}

Json storage_json(const PlannedRun& run) {
  std::uint64_t weights = 0, state = 0;
  for (const swap::Chunk& chunk : run.plan.layout->chunks()) {
    weights += chunk.word_bytes();
    state += chunk.trainable ? chunk.state_bytes : 0;
  }
  const std::uint64_t gradients = waiting_gradients(run.plan).on_storage;
  const swap::StoreOptions options = store_options(run.spec, run.session, run.plan);
  const std::uint64_t bytes = run.plan.stored ? swap::Store::bytes_needed(options, *run.plan.layout) : 0;
  return {{"bytes", bytes},
          {"generations", options.generations},
          {"weights", run.plan.stored ? weights : 0},
          {"state", run.plan.stored ? state : 0},
          {"staged_gradients", gradients},
          {"bytes_per_parameter", static_cast<double>(bytes) / static_cast<double>(run.spec.parameters())}};
}

Json clip_json(const PlannedRun& run) {
  Json clip{{"norm", run.session.clip ? Json(*run.session.clip) : Json("none")},
            {"staged", run.plan.arrangement.staged}};
  const WaitingGradients waiting = run.plan.arrangement.staged ? waiting_gradients(run.plan) : WaitingGradients{};
  clip["gradients_in_memory"] = waiting.in_memory;
  clip["gradients_on_storage"] = waiting.on_storage;
  clip["extra_read"] = waiting.on_storage;
  clip["extra_written"] = waiting.on_storage;
  clip["step_s_without"] = run.step_seconds_unclipped ? Json(*run.step_seconds_unclipped) : Json();
  return clip;
}

Json step_json(const PlannedRun& run) {
  const Prediction& prediction = run.prediction;
  const auto tokens = run.session.micro_batch * run.session.micro_batches * run.session.sequence_length;
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
          {"compute_waits_s", waited},
          {"stalls", stalls}};
}

Json machine_json(const MachineProfile& machine) {
  const swap::MachineRates& r = machine.rates;
  return {{"disk_read", r.disk_read},
          {"disk_write", r.disk_write},
          {"disk_mixed", r.disk_mixed},
          {"upload", r.upload},
          {"download", r.download},
          {"cast", r.cast},
          {"fill", r.fill},
          {"measure", r.measure},
          {"checksum", r.checksum},
          {"cores", r.cores},
          {"threads", r.threads},
          {"update", machine.update},
          {"device_update", machine.device_update}};
}

std::string count(double n) {
  return n >= 1e9 ? fmt::format("{:.2f}B", n / 1e9) : n >= 1e6 ? fmt::format("{:.1f}M", n / 1e6) : fmt::format("{}", n);
}

std::string size(const Json& bytes) {
  return human_bytes(bytes.get<std::uint64_t>());
}

std::string seconds(double s) {
  return s >= 100 ? fmt::format("{:.0f} s", s)
         : s >= 1 ? fmt::format("{:.2f} s", s)
                  : fmt::format("{:.0f} ms", s * 1e3);
}

}  // namespace

PredictedMemory predicted_memory(const SessionPlan& plan, const SessionOptions& session, const ModelSpec& spec,
                                 const ModelProfile& model) {
  PredictedMemory memory;
  const ComputeNeeds needs = model.needs(spec);
  memory.device = plan.arrangement.device_bytes() + model.device_fixed +
                  needs.expected(plan.arrangement.micro_batches) + kept_carries(plan) + kept_activations(plan, needs);
  memory.device =
      std::min(memory.device, session.device_memory);  // torch gives back what it keeps before it takes more
  memory.host = plan.arrangement.host_bytes(*plan.layout);
  memory.process = model.process_bytes + memory.host + (session.device == "cuda" ? 0 : memory.device);
  return memory;
}

Json plan_json(const PlannedRun& run) {
  const swap::Arrangement& at = run.plan.arrangement;
  const swap::Layout& layout = *run.plan.layout;
  std::size_t tiles = 0, halves = 0;
  for (const StageSpec& stage : run.spec.stages) {
    tiles += stage.kind == StageKind::head_tile ? 1 : 0;
    halves += stage.kind == StageKind::attention ? 1 : 0;
  }
  const PredictedMemory memory = predicted_memory(run.plan, run.session, run.spec, run.model);
  const double written = 1e-12 * static_cast<double>(run.plan.writes.update + run.plan.writes.gradients);
  std::vector<std::string> folders;
  for (const auto& folder : run.session.storage) folders.push_back(folder.string());
  Json storage = storage_json(run);
  storage["folders"] = folders;
  return {{"model",
           {{"architecture", run.spec.config.architecture},
            {"family", name_of(run.spec.config.family)},
            {"parameters", run.spec.parameters()},
            {"units", run.spec.units.size()},
            {"stages", run.spec.stages.size()},
            {"vocabulary_tiles", tiles == 0 ? 1 : tiles + 1},
            {"blocks_in_halves", halves},
            {"chunks", layout.chunks().size()}}},
          {"precision",
           {{"policy", precision_name(run.session.precision)},
            {"layers", layers_json(run.plan.packed)},
            {"moments_32", moments_32_json(run.plan.packed)}}},
          {"storage", storage},
          {"host",
           {{"budget", run.session.host_memory},
            {"used", at.host_bytes(layout)},
            {"buffers", at.buffer_bytes(layout)},
            {"resident", at.resident_bytes(layout)},
            {"activations", at.carry_bytes(layout)},
            {"weights_resident", share(at.hi_resident, layout)},
            {"state_resident", share(at.state_resident, layout)},
            {"gradients_resident", at.staged ? share(at.gradient_resident, layout) : 0.0}}},
          {"device",
           {{"name", run.session.device},
            {"budget", run.session.device_memory},
            {"weights", at.weight_ring},
            {"gradients", at.gradient_ring + at.held_gradients},
            {"activations", kept_carries(run.plan) + at.carry_slots * at.carry_slot_bytes +
                                kept_activations(run.plan, run.model.needs(run.spec))},
            {"layers_keeping", std::count(at.keeps.begin(), at.keeps.end(), true)},
            {"layers_on_host", std::count(at.carry_on_host.begin(), at.carry_on_host.end(), true)},
            {"workspace", run.plan.workspace}}},
          {"clip", clip_json(run)},
          {"updates", updates_json(run)},
          {"step", step_json(run)},
          {"wear",
           {{"tb_written_per_step", written}, {"tb_written_per_day", written * 86400 / run.prediction.step_seconds}}},
          {"memory", {{"device_peak", memory.device}, {"host", memory.host}, {"process_peak", memory.process}}},
          {"machine", machine_json(run.machine)},
          {"checked", true}};
}

std::string plan_text(const Json& plan) {
  std::string text;
  const auto row = [&](const char* name, const std::string& value) { text += fmt::format("{:<10} {}\n", name, value); };
  const Json &model = plan["model"], &precision = plan["precision"], &storage = plan["storage"], &host = plan["host"],
             &device = plan["device"], &clip = plan["clip"], &step = plan["step"], &memory = plan["memory"];
  std::string cut;
  if (model["vocabulary_tiles"] != 1)
    cut += fmt::format(", the vocabulary in {} tiles", model["vocabulary_tiles"].get<int>());
  if (model["blocks_in_halves"] != 0) cut += ", blocks in halves";
  row("model", fmt::format("{}, {} parameters, {} units in {} stages{}", model["architecture"].get<std::string>(),
                           count(model["parameters"]), model["units"].get<int>(), model["stages"].get<int>(), cut));
  row("precision", precision["policy"].get<std::string>());
  for (const Json& layers : precision["layers"])
    row("", fmt::format("{:<20} {:>4} {:>9}  {:<20} {:>10}", layers["layers"].get<std::string>(),
                        layers["units"].get<int>(), count(layers["parameters"]), layers["precision"].get<std::string>(),
                        size(layers["bytes"])));
  if (precision["moments_32"]["parameters"] != 0)
    row("", fmt::format("32-bit moments of {} parameters take {} more than 8-bit ones",
                        count(precision["moments_32"]["parameters"]), size(precision["moments_32"]["extra_bytes"])));
  if (storage["bytes"] == 0)
    row("storage", "nothing: all state is resident");
  else
    row("storage", fmt::format("{}, {:.2f} bytes a parameter, {} generation: {} weights, {} state, {} staged gradients",
                               size(storage["bytes"]), storage["bytes_per_parameter"].get<double>(),
                               storage["generations"].get<int>(), size(storage["weights"]), size(storage["state"]),
                               size(storage["staged_gradients"])));
  const auto percent = [](const Json& part) { return fmt::format("{:.0f}%", 100 * part.get<double>()); };
  row("host",
      fmt::format(
          "{} of {}: {} buffers, {} resident ({} of the weights, {} of the state{}), {} activations",
          size(host["used"]), size(host["budget"]), size(host["buffers"]), size(host["resident"]),
          percent(host["weights_resident"]), percent(host["state_resident"]),
          clip["staged"].get<bool>() ? ", " + percent(host["gradients_resident"]) + " of the staged gradients" : "",
          size(host["activations"])));
  row("device",
      fmt::format("{} of {} on {}: {} weights, {} gradients, {} activations, {} workspace", size(memory["device_peak"]),
                  size(device["budget"]), device["name"].get<std::string>(), size(device["weights"]),
                  size(device["gradients"]), size(device["activations"]), size(device["workspace"])));
  row("", fmt::format("{} of {} stages keep their activations, the others compute them again",
                      device["layers_keeping"].get<int>(), model["stages"].get<int>()));
  row("memory", fmt::format("the process {} at most", size(memory["process_peak"])));
  const double step_s = step["step_s"];
  row("step", fmt::format("{} tokens in {}: {:.0f} tokens/s, limited by {}", step["tokens"].get<std::int64_t>(),
                          seconds(step_s), step["tokens_per_s"].get<double>(), step["limit"].get<std::string>()));
  for (const auto& [lane, of] : step["lanes"].items())
    row("", lane == "compute" ? fmt::format("{:<10} {:>10} {:>10} {:>5.0f}%", lane, "", seconds(of["busy_s"]),
                                            100 * of["busy_s"].get<double>() / step_s)
                              : fmt::format("{:<10} {:>10} {:>10} {:>5.0f}%", lane, size(of["bytes"]),
                                            seconds(of["busy_s"]), 100 * of["busy_s"].get<double>() / step_s));
  std::string causes;
  for (const auto& [cause, waited] : step["stalls"].items())
    causes += fmt::format("{}{} for {}", causes.empty() ? ": " : ", ", seconds(waited), cause);
  row("", fmt::format("compute waits {}{}", seconds(step["compute_waits_s"]), causes));
  const auto without = [&] {
    return clip["step_s_without"].is_null()
               ? std::string()
               : fmt::format("; with --clip none a step takes {}", seconds(clip["step_s_without"]));
  };
  if (clip["staged"].get<bool>())
    row("clip", fmt::format("gradients wait for the norm: {} in RAM, {} on storage, written and read again{}",
                            size(clip["gradients_in_memory"]), size(clip["gradients_on_storage"]), without()));
  else
    row("clip", "none: no update waits for a norm");
  const Json& updates = plan["updates"];
  const bool staged = clip["staged"].get<bool>(), deferred = !staged && updates["deferred_share"] != 0,
             on_device = updates["device_share"] != 0;
  std::string when;
  if (deferred)
    when = fmt::format("{} of them wait for the next forward, with {} of gradients in RAM and {} on storage; ",
                       percent(updates["deferred_share"]), size(updates["gradients_in_memory"]),
                       size(updates["gradients_on_storage"]));
  if (on_device) when += fmt::format("{} of them run on the device; ", percent(updates["device_share"]));
  if (!when.empty())
    row("updates", when + fmt::format("otherwise a step takes {}", seconds(updates["step_s_plain"])));
  else if (!staged)
    row("updates", "all run beside the backward; letting some wait for the next forward gains nothing");
  if (storage["bytes"] != 0)
    row("wear",
        fmt::format("{:.3g} TB written a step, {:.3g} TB a day", plan["wear"]["tb_written_per_step"].get<double>(),
                    plan["wear"]["tb_written_per_day"].get<double>()));
  row("checked", "every read finds what it is for, every parameter is updated once, nothing can deadlock");
  return text;
}

}  // namespace tierflow

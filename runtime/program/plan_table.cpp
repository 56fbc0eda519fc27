// The plan as people read it.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "runtime/base/machine.h"
#include "runtime/planning/speculation.h"
#include "runtime/program/plan_report.h"

namespace tierflow {
namespace {

using Json = nlohmann::ordered_json;

std::string size(const Json& bytes) {
  return human_bytes(bytes.get<std::uint64_t>());
}

std::string seconds(double s) {
  return s >= 100 ? fmt::format("{:.0f} s", s)
         : s >= 1 ? fmt::format("{:.2f} s", s)
                  : fmt::format("{:.0f} ms", s * 1e3);
}

std::string rate(double value) {
  for (const auto& [unit, name] : {std::pair{1e12, " T"}, {1e9, " G"}, {1e6, " M"}})
    if (value >= unit) return fmt::format("{:.4g}{}", value / unit, name);
  return fmt::format("{:.4g}", value);
}

std::string activations_text(const Json& of, double step_s) {
  const int host = of["swapped_to_host"], storage = of["swapped_to_storage"];
  std::string text = fmt::format("activations (layers x micro-batches): {} kept, ", of["kept"].get<int>());
  if (host != 0) text += fmt::format("{} swapped to the host, ", host);
  if (storage != 0) text += fmt::format("{} to storage ({}), ", storage, size(of["bytes_to_storage"]));
  text += fmt::format("{} computed again", of["recomputed"].get<int>());
  const double without = of["step_s_without_swapping"];
  if (host + storage != 0 && without > step_s)
    text += fmt::format("; without swapping a step takes {}", seconds(without));
  return text;
}

std::string break_even_text(const Json& of) {
  if (of.is_null()) return "compute is never the limit: what each micro-batch saves and reads back takes longer";
  if (of["hidden_last"].is_null()) return "streaming hides behind compute in a step of any size";
  return fmt::format("streaming hides behind compute from about {} tokens a step on (--micro-batches {}), {} last",
                     of["tokens"].get<std::int64_t>(), of["micro_batches"].get<std::int64_t>(),
                     of["hidden_last"].get<std::string>());
}

}  // namespace

std::string speed_text(double tokens_per_second) {
  return tokens_per_second < 9.95 ? fmt::format("{:.2g} tokens/s", tokens_per_second)
                                  : fmt::format("{:.0f} tokens/s", tokens_per_second);
}

std::string speculation_text(double staged_seconds, std::optional<double> speculative_seconds,
                             const std::string& staged_because, std::int64_t tokens) {
  const auto takes = [&](const char* kind, double seconds) {
    const std::string time = seconds < 100 ? fmt::format("{:.3g}", seconds) : fmt::format("{:.0f}", seconds);
    return fmt::format("a {} step takes {} s, {}", kind, time, speed_text(static_cast<double>(tokens) / seconds));
  };
  std::string text = takes("staged", staged_seconds);
  if (speculative_seconds) text += "; " + takes("speculative", *speculative_seconds);
  return text + (staged_because.empty()
                     ? fmt::format(": while the last {} norms are at most {:.2g} of the clip", kNormsSeen, kShareOfClip)
                     : "; all are staged: " + staged_because);
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
  const std::string active =
      model["experts"] == 0 ? "" : fmt::format(" ({} active in a token)", human_count(model["active_parameters"]));
  row("model", fmt::format("{}, {} parameters{}, {} units in {} stages{}", model["architecture"].get<std::string>(),
                           human_count(model["parameters"]), active, model["units"].get<int>(),
                           model["stages"].get<int>(), cut));
  row("precision", precision["policy"].get<std::string>());
  for (const Json& layers : precision["layers"])
    row("", fmt::format("{:<20} {:>4} {:>9}  {:<20} {:>10}", layers["layers"].get<std::string>(),
                        layers["units"].get<int>(), human_count(layers["parameters"]),
                        layers["precision"].get<std::string>(), size(layers["bytes"])));
  if (precision["moments_32"]["parameters"] != 0)
    row("",
        fmt::format("32-bit moments of {} parameters take {} more than 8-bit ones",
                    human_count(precision["moments_32"]["parameters"]), size(precision["moments_32"]["extra_bytes"])));
  if (storage["bytes"] == 0)
    row("storage", "nothing: all state is resident");
  else
    row("storage",
        fmt::format("{}, {:.2f} bytes a parameter: {} weights, {} state, {} a second generation of them, {} staged "
                    "gradients, {} activations",
                    size(storage["bytes"]), storage["bytes_per_parameter"].get<double>(), size(storage["weights"]),
                    size(storage["state"]), size(storage["second_generation"]), size(storage["staged_gradients"]),
                    size(storage["activations"])));
  if (host["keys_and_values"] != 0)
    row("", fmt::format("keys and values of samples: {} in RAM, {} on storage", size(host["keys_and_values"]),
                        size(storage["keys_and_values"])));
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
  if (device["state"] != 0)
    row("", fmt::format("{} of it for good: the state of {} of the parameters, with gradients that wait",
                        size(device["state"]), percent(device["state_share"])));
  row("", activations_text(plan["activations"], step["step_s"]));
  for (const Json& shape : plan["step_shapes"]) {
    const std::string of = fmt::format("--micro-batch {} --micro-batches {}: ", shape["micro_batch"].get<int>(),
                                       shape["micro_batches"].get<int>());
    row(&shape == &plan["step_shapes"].front() ? "shapes" : "",
        of + (shape["refused"].is_null() ? speed_text(shape["tokens_per_s"].get<double>())
                                         : shape["refused"].get<std::string>()));
  }
  row("memory", fmt::format("the process {} at most", size(memory["process_peak"])));
  const double step_s = step["step_s"];
  row("step", fmt::format("{} tokens in {}: {}, limited by {}", step["tokens"].get<std::int64_t>(), seconds(step_s),
                          speed_text(step["tokens_per_s"].get<double>()), step["limit"].get<std::string>()));
  for (const auto& [lane, of] : step["lanes"].items())
    row("", lane == "compute" ? fmt::format("{:<10} {:>10} {:>10} {:>5.0f}%", lane, "", seconds(of["busy_s"]),
                                            100 * of["busy_s"].get<double>() / step_s)
                              : fmt::format("{:<10} {:>10} {:>10} {:>5.0f}%", lane, size(of["bytes"]),
                                            seconds(of["busy_s"]), 100 * of["busy_s"].get<double>() / step_s));
  std::string causes;
  for (const auto& [cause, waited] : step["stalls"].items())
    causes += fmt::format("{}{} for {}", causes.empty() ? ": " : ", ", seconds(waited), cause);
  row("", fmt::format("compute waits {}{}", seconds(step["compute_waits_s"]), causes));
  row("", break_even_text(step["break_even"]));
  const auto waiting_there = [&](const Json& of) {
    return of["gradients_on_device"] == 0 ? std::string() : size(of["gradients_on_device"]) + " on the device, ";
  };
  const auto without = [&] {
    return clip["step_s_without"].is_null()
               ? std::string()
               : fmt::format("; with --clip none a step takes {}", seconds(clip["step_s_without"]));
  };
  if (clip["staged"].get<bool>()) {
    row("clip", fmt::format("gradients wait for the norm: {}{} in RAM, {} on storage, written and read again{}",
                            waiting_there(clip), size(clip["gradients_in_memory"]), size(clip["gradients_on_storage"]),
                            without()));
    const Json &speculative = clip["step_s_speculative"], &because = clip["staged_because"];
    row("", speculation_text(step_s, speculative.is_null() ? std::nullopt : std::optional(speculative.get<double>()),
                             because.is_null() ? "" : because.get<std::string>(), step["tokens"]));
  } else
    row("clip", "none: no update waits for a norm");
  const Json& updates = plan["updates"];
  const bool staged = clip["staged"].get<bool>(), deferred = !staged && updates["deferred_share"] != 0,
             on_device = updates["device_share"] != device["state_share"];
  std::string when;
  if (deferred)
    when = fmt::format("{} of them wait for the next forward, with gradients of {}{} in RAM and {} on storage; ",
                       percent(updates["deferred_share"]), waiting_there(updates), size(updates["gradients_in_memory"]),
                       size(updates["gradients_on_storage"]));
  if (on_device) when += fmt::format("{} of them run on the device; ", percent(updates["device_share"]));
  if (!when.empty())
    row("updates", when + fmt::format("otherwise a step takes {}", seconds(updates["step_s_plain"])));
  else if (device["state"] != 0)
    row("updates",
        fmt::format("{} of them run on the device, where their state stays", percent(updates["device_share"])));
  else if (!staged)
    row("updates", "all run beside the backward; letting some wait for the next forward gains nothing");
  if (const Json& galore = plan["galore"]; !galore.is_null()) {
    const Json& full = galore["full"];
    const auto beside = [&](const char* of) {
      return full.is_null() ? size(galore[of]) : fmt::format("{} (full tuning {})", size(galore[of]), size(full[of]));
    };
    row("galore",
        fmt::format("{} weights are trained through {}, projected anew every {} steps by {}",
                    human_count(galore["projected_parameters"]), human_count(galore["trained_in_their_place"]),
                    galore["update_gap"].get<std::int64_t>(), human_count(galore["projector_parameters"])));
    row("", fmt::format("weights and state {}; a step reads {}, writes {} and takes {} of gradients to the host",
                        beside("state"), beside("read_per_step"), beside("written_per_step"),
                        beside("gradients_per_step")));
    row("", fmt::format("the projected weights themselves are written once a window, which begins with {} in all",
                        size(galore["written_per_window"])));
  }
  if (const Json& reference = plan["reference"]; !reference.is_null()) {
    if (reference["pairs_per_s"].is_null())
      row("reference", "the base, computed in the visits of each step; its time is in the step's");
    else
      row("reference",
          fmt::format(
              "computed before the first step, forward alone: {:.1f} pairs/s; {} bytes of RAM a pair beside the "
              "above{}",
              reference["pairs_per_s"].get<double>(), reference["host_bytes_per_pair"].get<int>(),
              storage["bytes"] == 0
                  ? std::string()
                  : fmt::format(" and {} of storage", reference["storage_bytes_per_pair"].get<int>())));
  }
  if (storage["bytes"] != 0)
    row("wear",
        fmt::format("{:.3g} TB written a step, {:.3g} TB a day", plan["wear"]["tb_written_per_step"].get<double>(),
                    plan["wear"]["tb_written_per_day"].get<double>()));
  const Json& profile = plan["profile"];
  if (const Json& modelled = plan["modelled"]; !modelled.is_null()) {
    row("machine", modelled["name"].get<std::string>() + ": " + modelled["note"].get<std::string>());
    for (const Json& figure : modelled["figures"])
      row("", fmt::format("{:<16} {:>9}  {}", figure["name"].get<std::string>(), rate(figure["value"]),
                          figure["source"].get<std::string>()));
  } else
    row("profile", profile["doubt"].is_null()
                       ? fmt::format("readings {:.0f}% apart{}", 100 * profile["stages"]["spread"].get<double>(),
                                     profile["stages"]["corrected"].get<bool>() ? ", corrected by a run" : "")
                       : profile["doubt"].get<std::string>() + "; --refresh-profile measures again");
  row("checked", "every read finds what it is for, every parameter is updated once, nothing can deadlock");
  return text;
}

}  // namespace tierflow

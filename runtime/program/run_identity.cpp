#include "runtime/program/run_identity.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <nlohmann/json.hpp>
#include <span>

#include "io/checksum.h"
#include "runtime/base/exception.h"
#include "runtime/checkpoint/weights_hash.h"
#include "runtime/program/loss_options.h"

namespace tierflow {

using nlohmann::json;

namespace {

constexpr const char* kModel = "model";

}  // namespace

std::optional<std::uint64_t> hash_of_weights(const TrainOptions& options, const ModelSpec& spec, bool resumed) {
  if (!options.config.empty()) return {};
  try {
    return weights_hash(options.model, spec.read_as);
  } catch (const Exception&) {
    if (!resumed) throw;
    return {};
  }
}

std::string run_identity(const TrainOptions& options, std::uint64_t data, std::optional<std::uint64_t> weights,
                         std::optional<std::uint64_t> teacher, bool base_is_reference) {
  json identity{{"data", fmt::format("{:016x}", data)},
                {"sequence-length", options.sequence_length},
                {"micro-batch", options.micro_batch},
                {"micro-batches", options.micro_batches},
                {"seed", options.seed},
                {"clip", options.clip ? json(*options.clip) : json("none")},
                {"weight-decay", options.weight_decay},
                {"betas", {options.beta1, options.beta2}},
                {"eps", options.eps}};
  if (loss_rule(options).pairs())  // whose data are no other run's
    identity.update({{"loss", options.loss}, {"beta", options.beta}, {"simpo-gamma", options.simpo_gamma}});
  if (base_is_reference) identity["reference"] = "base";
  if (weights) identity[kModel] = hash_text(*weights);
  if (teacher)
    identity.update({{"distill", fmt::format("{:016x}", *teacher)},
                     {"kd-alpha", options.kd.alpha},
                     {"kd-ce-alpha", options.kd.ce_alpha},
                     {"kd-temperature", options.kd.temperature}});
  return identity.dump();
}

std::string with_weights_of(const std::string& then, const std::string& now) {
  const json before = json::parse(then, nullptr, false);
  json made = json::parse(now);
  made.erase(kModel);
  if (before.is_object() && before.contains(kModel)) made[kModel] = before[kModel];
  return made.dump();
}

std::string weights_of_run(const std::string& identity) {
  const json run = json::parse(identity, nullptr, false);
  return run.is_object() && run.contains(kModel) && run[kModel].is_string() ? run[kModel].get<std::string>() : "";
}

namespace {

constexpr const char* kStopped = "stopped";
constexpr std::size_t kMostNamed = 5;
constexpr std::array kChooseNoResult = {"allow-any-filesystem",
                                        "allow-buffered",
                                        "data-cache",
                                        "device-memory",
                                        "durability",
                                        "engine",
                                        "export-bandwidth",
                                        "fresh",
                                        "go-back",
                                        "host-memory",
                                        "json",
                                        "log-json",
                                        "max-new-tokens",
                                        "out",
                                        "python",
                                        "resume",
                                        "sample-every",
                                        "sample-prompts",
                                        kStopped,
                                        "storage",
                                        "threads",
                                        "trace"};

// Of an option and both of its values: "--NAME X, not Y"; "none" where there is none.
std::string differing(const std::string& option, const json& had, const json& value) {
  const auto text = [](const json& it) { return it.is_null() ? "none" : it.dump(); };
  return fmt::format("--{} {}, not {}", option, text(had), text(value));
}

void leave_out(json& options, std::span<const char* const> names) {
  for (const char* name : names) options.erase(name);
}

json options_of(const std::string& effective) {
  json options = json::parse(effective, nullptr, false);
  return options.is_object() ? options : json::object();
}

// Whether the run ends, or keeps a model, by what its evaluations find.
bool ends_by_evaluations(const json& options) {
  return options.value("export-best", json(false)) != false || options.value("early-stopping-patience", json(0)) != 0;
}

}  // namespace

std::string other_result(const std::string& then, const std::string& now) {
  json before = options_of(then), wanted = options_of(now);
  const bool evaluations_choose = ends_by_evaluations(before) || ends_by_evaluations(wanted);
  for (json* options : {&before, &wanted}) {
    leave_out(*options, kChooseNoResult);
    if (!evaluations_choose) leave_out(*options, std::array{"eval-every", "eval-sequences"});
  }
  json all = before;
  all.update(wanted);
  std::vector<std::string> what;
  for (const auto& [option, unused] : all.items()) {
    const json had = before.value(option, json()), value = wanted.value(option, json());
    if (had != value) what.push_back(differing(option, had, value));
  }
  if (const std::size_t others = what.size(); others > kMostNamed) {
    what.resize(kMostNamed);
    what.push_back(fmt::format("{} other options that differ", others - kMostNamed));
  }
  return fmt::format("{}", fmt::join(what, " and "));
}

std::string stopped_at(const std::string& effective, std::int64_t step, std::int64_t of) {
  json options = json::parse(effective);
  options[kStopped] = {{"step", step}, {"of", of}};
  return options.dump();
}

std::string was_stopped(const std::string& effective) {
  const json options = options_of(effective);
  const json stopped = options.value(kStopped, json());
  if (!stopped.is_object()) return "";
  return fmt::format("step {} of {}", stopped.value("step", std::int64_t{0}), stopped.value("of", std::int64_t{0}));
}

std::string configuration_hash(const std::string& effective) {
  json options = json::parse(effective, nullptr, false);
  if (options.is_object()) leave_out(options, std::array{"resume", "fresh", "go-back", kStopped});
  const std::string all = options.is_object() ? options.dump() : effective;
  return fmt::format("{:016x}", io::content_hash(std::as_bytes(std::span(all))));
}

void expect_same_run(const std::string& then, const std::string& now, const Folders& storage) {
  const json before = json::parse(then, nullptr, false), wanted = json::parse(now);
  if (!is_of_train(then))
    fail(io::ErrorKind::usage, storage.front().string(),
         "holds the state of a script's run, which goes on with it: name another folder as --storage; --fresh discards "
         "the state");
  const auto had_then = [&](const std::string& option) {
    return before.is_object() ? before.value(option, json()) : json();
  };
  // These choose the sequences too, so with another one `data` tells nothing.
  const bool cut_otherwise =
      had_then("seed") != wanted["seed"] || had_then("sequence-length") != wanted["sequence-length"];
  std::string what;
  for (const auto& [option, value] : wanted.items()) {
    const json had = had_then(option);
    if (had == value || (option == "data" && cut_otherwise) || (option == kModel && had.is_null())) continue;
    if (!what.empty()) what += " and ";
    what += option == "data"
                ? "other --data (or another tokenizer, --held-out, --packing, --train-on or another option of the data)"
            : option == kModel    ? "other weights in --model"
            : option == "distill" ? (had.is_null() ? "no --distill" : "another file of --distill")
                                  : fmt::format("--{} {}, not {}", option, had.dump(), value.dump());
    if (option == "distill" && had.is_null()) break;  // nor what belongs to it
  }
  if (before.is_object() && before.contains("distill") && !wanted.contains("distill"))
    what += std::string(what.empty() ? "" : " and ") + "--distill";
  if (!what.empty())
    fail(io::ErrorKind::usage, storage.front().string(),
         "the run whose state is here had " + what +
             ": the same command as then goes on with it, --fresh begins anew and discards it");
}

}  // namespace tierflow

#include "runtime/program/run_identity.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <span>

#include "io/checksum.h"
#include "runtime/base/exception.h"
#include "runtime/program/loss_options.h"

namespace tierflow {

using nlohmann::json;

std::string run_identity(const TrainOptions& options, std::uint64_t data, std::optional<std::uint64_t> teacher,
                         bool base_is_reference) {
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
  if (teacher)
    identity.update({{"distill", fmt::format("{:016x}", *teacher)},
                     {"kd-alpha", options.kd.alpha},
                     {"kd-ce-alpha", options.kd.ce_alpha},
                     {"kd-temperature", options.kd.temperature}});
  return identity.dump();
}

std::string configuration_hash(const std::string& effective) {
  json options = json::parse(effective, nullptr, false);
  if (options.is_object())
    for (const char* how : {"resume", "fresh", "go-back"}) options.erase(how);
  const std::string all = options.is_object() ? options.dump() : effective;
  return fmt::format("{:016x}", io::content_hash(std::as_bytes(std::span(all))));
}

void expect_same_run(const std::string& then, const std::string& now, const Folders& storage) {
  const json before = json::parse(then, nullptr, false), wanted = json::parse(now);
  const auto had_then = [&](const std::string& option) {
    return before.is_object() ? before.value(option, json()) : json();
  };
  // These choose the sequences too, so with another one `data` tells nothing.
  const bool cut_otherwise =
      had_then("seed") != wanted["seed"] || had_then("sequence-length") != wanted["sequence-length"];
  std::string what;
  for (const auto& [option, value] : wanted.items()) {
    const json had = had_then(option);
    if (had == value || (option == "data" && cut_otherwise)) continue;
    if (!what.empty()) what += " and ";
    what += option == "data"
                ? "other --data (or another tokenizer, --held-out, --packing, --train-on or another option of the data)"
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

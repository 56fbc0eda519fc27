#include "runtime/stream/durable_store.h"

#include <nlohmann/json.hpp>

#include "runtime/base/exception.h"
#include "runtime/planning/moved_store.h"
#include "runtime/planning/storage_volume.h"
#include "runtime/spec/unit_list.h"
#include "runtime/stream/streamer_plan.h"

namespace tierflow {
namespace {

using nlohmann::json;

// Names, shapes and formats are the model; the rest is said as what it is.
void expect_same(const json& then, const json& now, const std::string& where, const std::string& remedy) {
  std::string what;
  const auto compare = [&](const json& before, const json& here, const auto& name_of) {
    for (const auto& [key, value] : here.items()) {
      if (key == "weights" && before.is_object() && !before.contains(key)) continue;  // of an earlier version
      if (key == "run" || (before.is_object() && before.value(key, json()) == value)) continue;
      what += (what.empty() ? "" : " and ") + std::string("another ") + name_of(key);
    }
  };
  compare(then, now, [](const std::string& key) { return key == "units" ? "model (or other trained parts)" : key; });
  const auto run_of = [](const json& identity) {
    return json::parse(identity.is_object() ? identity.value("run", "") : "", nullptr, false);
  };
  compare(run_of(then), run_of(now), [](const std::string& key) { return key == "weights" ? "model's weights" : key; });
  if (!what.empty()) fail(io::ErrorKind::usage, where, "the run whose state is here had " + what + remedy);
}

}  // namespace

std::string durable_identity(const std::vector<UnitSpec>& units, const StreamerOptions& options) {
  return json{{"units", unit_list(units)},
              {"precision", precision_name(options.precision)},
              {"seed", options.seed},
              {"run", options.run.empty() ? "{}" : options.run}}
      .dump();
}

std::optional<swap::Store::Contents> find_durable(const std::vector<UnitSpec>& units, const StreamerOptions& options,
                                                  const Progress& progress, const Say& say) {
  if (options.storage.empty()) fail_usage("a durable run keeps its state in folders, and none is named: use --storage");
  const Folders first = finish_move(volume_in(options, options.engine), say);
  const Folders& lies = first.empty() ? options.storage : first;
  const LeftStore left = find_left_store(lies);
  if (!left.there) return {};
  if (left.empty) {
    discard_store(lies);
    return {};
  }
  const std::string remedy = ": the same script as then goes on with it; to begin anew, remove " + left.state.string() +
                             "* there (and in every other folder of the run), or name others";
  if (left.readable && !left.streamed)
    fail(io::ErrorKind::usage, left.state.string(),
         is_of_train(left.run) ? "is the state of a run of `tierflow train`, which goes on with it"
                               : "is the state of a run of another kind, such as a tierflow.Session: the script that "
                                 "made it goes on with it");
  io::VolumeOptions volume = volume_in(options, options.engine);
  volume.folders = lies;
  swap::Store::Contents contents = value_or_throw(swap::Store::inspect(std::move(volume)));
  if (!left.readable)
    fail(io::ErrorKind::corruption, left.state.string(), "holds no state that was committed" + remedy);
  expect_same(json::parse(contents.identity, nullptr, false), json::parse(durable_identity(units, options)),
              options.storage.front().string(), remedy);
  if (first.empty()) return contents;
  move_store(volume_in(options, options.engine), first, say, progress);
  return value_or_throw(
      swap::Store::inspect(volume_in(options, options.engine)));  // its generations have other numbers
}

std::string keep_commit(const swap::Store& store, const StreamerOptions& options, const StreamerCommit& commit) {
  const std::string checksum = keep_beside(options.storage, store.generation() + 1, commit.beside);
  return json{{"step", commit.step}, {"beside", checksum}}.dump();
}

StreamerCommit committed_in(const swap::Store& store, const StreamerOptions& options) {
  const json progress = json::parse(store.progress(), nullptr, false);
  try {
    return {.step = progress.at("step").get<std::int64_t>(),
            .beside = read_beside(options.storage, store.generation(), progress.at("beside").get<std::string>())};
  } catch (const json::exception&) {
    fail(io::ErrorKind::corruption, options.storage.front().string(),
         "the store does not say after which step it was committed");
  }
}

}  // namespace tierflow

#pragma once
// What was measured of this machine and of a model's stages on it, and the files that keep it. It is measured once, and
// used by every plan until something that it depends on changes. No torch here; runtime/session/profiler.h measures.
#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "runtime/base/progress.h"
#include "runtime/planning/session_options.h"
#include "runtime/planning/session_plan.h"
#include "runtime/spec/model_spec.h"
#include "swap/rates.h"

namespace tierflow {

// How far the measurements can be trusted.
struct Readings {
  double spread = 0;       // of repeated readings: distance of their quartiles as a share of the median, on average
  double other_cores = 0;  // cores that other programs took meanwhile
  bool corrected = false;  // by what a later run took

  bool steady(int cores) const;  // whether the readings can be trusted
};

struct MachineProfile {
  swap::MachineRates rates;
  // Parameters a second on all cores and on the device, by the name of a state's precision. The CPU device has no rate
  // of its own.
  std::map<std::string, double> update, device_update;
  Readings readings;
};

// Of one micro-batch in the stages of a model, whatever its depth.
struct ModelProfile {
  struct Stage {
    std::uint64_t carry_bytes = 0, activation_bytes = 0, swapped_bytes = 0;
    swap::StageSeconds seconds;
  };
  std::map<std::string, Stage> stages;  // by stage_class()
  // As in ComputeNeeds.
  std::uint64_t stage_peak = 0, keeping_peak = 0, micro_batch_bytes = 0, device_fixed = 0, held_peak = 0;
  std::uint64_t process_bytes = 0;  // resident besides budgets: the program and LibTorch
  // The share of the model's width that was measured. It is less than 1 where the whole width would have taken longer
  // than allowed; the values here are then scaled.
  double width = 1, seconds_allowed = 0;
  Readings readings;

  bool covers(const ModelSpec& spec) const;
  // Of a model that it covers.
  ComputeNeeds needs(const ModelSpec& spec) const;
  std::vector<swap::StageSeconds> seconds(const ModelSpec& spec) const;  // by stage
};

struct Profile {
  MachineProfile machine;
  ModelProfile model;
};
// What was measured, by name, as files and reports show it.
nlohmann::ordered_json to_json(const Readings& readings);
nlohmann::ordered_json rates_json(const MachineProfile& profile);

// Why predictions from it may be wrong, in a few words; empty if everything was measured on a quiet machine.
std::string doubt_of(const Profile& profile);

// The files, one for a machine and one for a model on it, in $XDG_CACHE_HOME/tierflow or ~/.cache/tierflow. A file is
// used while everything that its content depends on is unchanged: processor, cores, threads, device, drives, the chunk
// size that follows from the host budget, the build of Tierflow; for a model also its shapes, micro-batch and sequence
// length, but neither drives nor chunks.
class ProfileCache {
 public:
  // `build` identifies what computes: the train library's size and time.
  ProfileCache(const ModelSpec& spec, const SessionOptions& options, const std::string& build, Say warn);

  // Empty if there is no file for this machine or model. A file that cannot be read causes a warning and counts as
  // missing.
  std::optional<MachineProfile> machine() const;
  std::optional<ModelProfile> model() const;
  // If the folder cannot be written there is a warning, and the next plan measures again.
  void keep(const MachineProfile& profile) const;
  void keep(const ModelProfile& profile) const;

 private:
  std::filesystem::path file(const char* what, const std::string& key) const;
  void write(const char* what, const std::string& key, const std::string& content) const;
  template <class Made>
  std::optional<Made> read(const char* what, const std::string& key,
                           Made (*make)(const nlohmann::json&, const std::string&)) const;

  std::filesystem::path folder_;  // empty: there is none
  std::string machine_key_, model_key_;
  Say warn_;
};

}  // namespace tierflow

#include "runtime/planning/profile.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <set>
#include <thread>

#include "runtime/base/exception.h"
#include "runtime/base/files.h"
#include "runtime/base/strict_json.h"
#include "runtime/spec/stage_class.h"

namespace tierflow {

nlohmann::ordered_json to_json(const Readings& readings) {
  return {{"spread", readings.spread}, {"other_cores", readings.other_cores}, {"corrected", readings.corrected}};
}

namespace {

// Names in files and reports.
template <class Of, class Value>
using Field = std::pair<const char*, Value Of::*>;
constexpr Field<swap::MachineRates, double> kRates[] = {{"disk_read", &swap::MachineRates::disk_read},
                                                        {"disk_write", &swap::MachineRates::disk_write},
                                                        {"disk_mixed", &swap::MachineRates::disk_mixed},
                                                        {"upload", &swap::MachineRates::upload},
                                                        {"download", &swap::MachineRates::download},
                                                        {"cast", &swap::MachineRates::cast},
                                                        {"fill", &swap::MachineRates::fill},
                                                        {"measure", &swap::MachineRates::measure},
                                                        {"checksum", &swap::MachineRates::checksum},
                                                        {"memory", &swap::MachineRates::memory}};
constexpr Field<swap::StageSeconds, double> kStageSeconds[] = {
    {"forward", &swap::StageSeconds::forward},
    {"backward", &swap::StageSeconds::backward},
    {"head", &swap::StageSeconds::head},
    {"forward_keeping", &swap::StageSeconds::forward_keeping},
    {"backward_kept", &swap::StageSeconds::backward_kept},
    {"forward_swapping", &swap::StageSeconds::forward_swapping},
    {"backward_swapped", &swap::StageSeconds::backward_swapped}};
constexpr Field<ModelProfile::Stage, std::uint64_t> kStageBytes[] = {
    {"carry_bytes", &ModelProfile::Stage::carry_bytes},
    {"activation_bytes", &ModelProfile::Stage::activation_bytes},
    {"swapped_bytes", &ModelProfile::Stage::swapped_bytes}};
constexpr Field<ModelProfile, std::uint64_t> kModelBytes[] = {{"stage_peak", &ModelProfile::stage_peak},
                                                              {"keeping_peak", &ModelProfile::keeping_peak},
                                                              {"micro_batch_bytes", &ModelProfile::micro_batch_bytes},
                                                              {"device_fixed", &ModelProfile::device_fixed},
                                                              {"held_peak", &ModelProfile::held_peak},
                                                              {"process_bytes", &ModelProfile::process_bytes}};

}  // namespace

nlohmann::ordered_json rates_json(const MachineProfile& profile) {
  nlohmann::ordered_json json;
  for (const auto& [name, rate] : kRates) json[name] = profile.rates.*rate;
  json["cores"] = profile.rates.cores;
  json["threads"] = profile.rates.threads;
  json["update"] = profile.update;
  json["device_update"] = profile.device_update;
  return json;
}

namespace {

namespace fs = std::filesystem;

constexpr int kVersion = 5;
constexpr std::uint64_t kLargestFile = 4 << 20;
constexpr std::int64_t kMostBytes = std::int64_t{1} << 60;
constexpr double kMostSeconds = 1e6, kFastest = 1e18;
constexpr double kSteadySpread = 0.15, kSteadyLoad = 0.15;  // the latter of all cores

std::string processor() {
  std::ifstream file("/proc/cpuinfo");
  std::string line, text;
  std::set<std::string> wanted{"model name", "cpu family", "model", "stepping"};
  while (std::getline(file, line) && !wanted.empty())
    if (wanted.erase(line.substr(0, line.find_last_not_of(" \t", line.find(':') - 1) + 1)) != 0)
      text += (text.empty() ? "" : ", ") + printable(line.substr(std::min(line.size(), line.find(':') + 2)));
  return text;
}

// The drive that a folder is on, or will be.
std::string drive_of(fs::path folder) {
  std::error_code error;
  folder = fs::absolute(folder, error).lexically_normal();
  struct stat found {};
  while (::stat(folder.c_str(), &found) != 0 && folder.has_relative_path()) folder = folder.parent_path();
  return std::to_string(major(found.st_dev)) + ":" + std::to_string(minor(found.st_dev));
}

Json machine_key(const SessionOptions& options, const std::string& build) {
  Json drives = Json::array();
  for (const fs::path& folder : options.storage) drives.push_back(drive_of(folder));
  return {{"processor", processor()},
          {"cores", std::thread::hardware_concurrency()},
          {"threads", options.update_threads},
          {"chunk", chunk_elements_for(options.host_memory)},
          {"device", options.device},
          {"drives", drives},
          {"engine", io::engine_name(options.engine)},
          {"buffered", options.allow_buffered},
          {"build", build}};
}

Json model_key(const ModelSpec& spec, const SessionOptions& options, const std::string& build) {
  const ModelConfig& c = spec.config;
  std::set<std::string> classes;
  for (int stage = 0; stage < static_cast<int>(spec.stages.size()); ++stage) classes.insert(stage_class(spec, stage));
  Json key = machine_key(options, build);
  key.erase("drives");
  key.erase("engine");
  key.erase("buffered");
  key.erase("chunk");
  key["model"] = {{"type", c.model_type},
                  {"hidden", c.hidden_size},
                  {"heads", {c.heads, c.kv_heads, c.head_dim}},
                  {"experts", {c.experts.count, c.experts.per_token}},
                  {"activation", static_cast<int>(c.activation)},
                  {"dropout", {c.embedding_dropout, c.residual_dropout, c.attention_dropout, c.adapter_dropout}},
                  {"norm_of_sum", c.norm_of_sum}};
  key["stages"] = classes;
  key["micro_batch"] = options.micro_batch;
  key["sequence_length"] = options.sequence_length;
  if (std::ranges::any_of(spec.stages, &StageSpec::together)) key["together"] = micro_batches_together(options);
  return key;
}

std::uint64_t hash(const std::string& text) {  // FNV-1a
  std::uint64_t value = 0xcbf29ce484222325ULL;
  for (const unsigned char byte : text) value = (value ^ byte) * 0x100000001b3ULL;
  return value;
}

const Json& object_in(const JsonFields& fields, const char* name) {
  const Json* found = fields.find(name);
  if (found == nullptr || !found->is_object()) fields.fail(name, "must be an object");
  return *found;
}

double rate(const JsonFields& fields, const char* name) {
  return fields.number_or(name, 0, 0, kFastest);
}

std::uint64_t bytes_in(const JsonFields& fields, const char* name) {
  return static_cast<std::uint64_t>(fields.integer(name, 0, kMostBytes));
}

double needed(const JsonFields& fields, const char* name) {
  const double value = fields.number_or(name, -1, -1, kMostSeconds);
  if (value < 0) fields.fail(name, "is missing or negative");
  return value;
}

Readings readings_from(const JsonFields& fields, const std::string& where) {
  const JsonFields of(object_in(fields, "readings"), where);
  return {.spread = needed(of, "spread"),
          .other_cores = needed(of, "other_cores"),
          .corrected = of.boolean_or("corrected", false)};
}

Json to_json(const MachineProfile& profile) {
  Json json = rates_json(profile);
  json["compute_on_cores"] = profile.rates.compute_on_cores;
  json["readings"] = to_json(profile.readings);
  return json;
}

MachineProfile machine_from(const Json& json, const std::string& where) {
  const JsonFields fields(json, where);
  MachineProfile profile;
  for (const auto& [name, value] : kRates) profile.rates.*value = rate(fields, name);
  profile.rates.cores = static_cast<int>(fields.integer("cores", 1, 1 << 16));
  profile.rates.threads = static_cast<int>(fields.integer("threads", 1, 1 << 16));
  profile.rates.compute_on_cores = fields.boolean_or("compute_on_cores", true);
  for (const auto& [key, rates] :
       {std::pair{"update", &profile.update}, std::pair{"device_update", &profile.device_update}}) {
    const JsonFields of(object_in(fields, key), where);
    for (const auto& [name, unused] : object_in(fields, key).items()) (*rates)[name] = rate(of, name.c_str());
  }
  profile.readings = readings_from(fields, where);
  return profile;
}

Json to_json(const ModelProfile& profile) {
  Json json, stages = Json::object();
  for (const auto& [name, stage] : profile.stages) {
    for (const auto& [field, bytes] : kStageBytes) stages[name][field] = stage.*bytes;
    for (const auto& [field, seconds] : kStageSeconds) stages[name][field] = stage.seconds.*seconds;
  }
  json["stages"] = std::move(stages);
  for (const auto& [field, bytes] : kModelBytes) json[field] = profile.*bytes;
  json["width"] = profile.width;
  json["seconds_allowed"] = profile.seconds_allowed;
  json["readings"] = to_json(profile.readings);
  return json;
}

ModelProfile model_from(const Json& json, const std::string& where) {
  const JsonFields fields(json, where);
  ModelProfile profile;
  for (const auto& [name, stage] : object_in(fields, "stages").items()) {
    if (!stage.is_object()) fields.fail("stages", "must hold objects");
    const JsonFields of(stage, where);
    ModelProfile::Stage& found = profile.stages[name];
    for (const auto& [field, bytes] : kStageBytes) found.*bytes = bytes_in(of, field);
    for (const auto& [field, seconds] : kStageSeconds) found.seconds.*seconds = needed(of, field);
    found.seconds.evaluate = found.seconds.forward;
  }
  for (const auto& [field, bytes] : kModelBytes) profile.*bytes = bytes_in(fields, field);
  profile.width = needed(fields, "width");
  profile.seconds_allowed = needed(fields, "seconds_allowed");
  profile.readings = readings_from(fields, where);
  return profile;
}

}  // namespace

bool Readings::steady(int cores) const {
  return corrected || (spread <= kSteadySpread && other_cores <= kSteadyLoad * cores);
}

std::string doubt_of(const Profile& profile) {
  const int cores = profile.machine.rates.cores;
  std::string doubt;
  const auto add = [&](const std::string& text) { doubt += (doubt.empty() ? "" : "; ") + text; };
  if (profile.model.width < 1)
    add(fmt::format("the stages were measured at {:.0f}% of their width and scaled", 100 * profile.model.width));
  const auto judge = [&](const Readings& of, const char* what) {
    if (of.steady(cores)) return;
    add(fmt::format("{} was measured while other programs took {:.1f} of {} cores, readings {:.0f}% apart", what,
                    of.other_cores, cores, 100 * of.spread));
  };
  judge(profile.machine.readings, "the machine");
  judge(profile.model.readings, "the model");
  return doubt;
}

bool ModelProfile::covers(const ModelSpec& spec) const {
  for (int stage = 0; stage < static_cast<int>(spec.stages.size()); ++stage)
    if (!stages.contains(stage_class(spec, stage))) return false;
  return true;
}

ComputeNeeds ModelProfile::needs(const ModelSpec& spec) const {
  ComputeNeeds needs{.keeping_peak = keeping_peak,
                     .stage_peak = stage_peak,
                     .micro_batch_bytes = micro_batch_bytes,
                     .device_fixed = device_fixed,
                     .held_peak = held_peak};
  for (int index = 0; index < static_cast<int>(spec.stages.size()); ++index) {
    const Stage& stage = stages.at(stage_class(spec, index));
    needs.carry_bytes.push_back(stage.carry_bytes);
    needs.activation_bytes.push_back(stage.activation_bytes);
    needs.swapped_bytes.push_back(stage.swapped_bytes);
  }
  return needs;
}

std::vector<swap::StageSeconds> ModelProfile::seconds(const ModelSpec& spec) const {
  std::vector<swap::StageSeconds> all;
  for (int stage = 0; stage < static_cast<int>(spec.stages.size()); ++stage)
    all.push_back(stages.at(stage_class(spec, stage)).seconds);
  return all;
}

ProfileCache::ProfileCache(const ModelSpec& spec, const SessionOptions& options, const std::string& build, Say warn)
    : folder_(cache_folder()),
      machine_key_(machine_key(options, build).dump()),
      model_key_(model_key(spec, options, build).dump()),
      warn_(std::move(warn)) {}

fs::path ProfileCache::file(const char* what, const std::string& key) const {
  char name[32];
  std::snprintf(name, sizeof name, "%s-%016llx.json", what, static_cast<unsigned long long>(hash(key)));
  return folder_ / name;
}

template <class Made>
std::optional<Made> ProfileCache::read(const char* what, const std::string& key,
                                       Made (*make)(const Json&, const std::string&)) const {
  std::error_code ignored;
  const fs::path path = file(what, key);
  if (folder_.empty() || !fs::exists(path, ignored)) return std::nullopt;
  try {
    const Json content = parse_json(read_text(path, kLargestFile), path.string());
    const JsonFields fields(content, path.string());
    if (fields.integer("version", 0, 1 << 20) != kVersion || object_in(fields, "key").dump() != key)
      return std::nullopt;
    return make(object_in(fields, "profile"), path.string());
  } catch (const Exception& error) {
    warn_(std::string("warning: ") + error.what() + "; it is measured again");
    return std::nullopt;
  }
}

void ProfileCache::write(const char* what, const std::string& key, const std::string& content) const {
  if (folder_.empty()) return;
  try {
    make_folder(folder_);
    // A name of this process's own: another one may be writing the same file.
    const fs::path path = file(what, key), own = path.string() + "." + std::to_string(::getpid());
    write_text(own, "{\"version\":" + std::to_string(kVersion) + ",\"key\":" + key + ",\"profile\":" + content + "}\n");
    std::error_code error;
    fs::rename(own, path, error);
    if (error) fail_system("rename", own.string(), error.value());
  } catch (const Exception& error) {
    warn_(std::string("warning: ") + error.what() + "; the next plan measures again");
  }
}

std::optional<MachineProfile> ProfileCache::machine() const {
  return read("machine", machine_key_, machine_from);
}

std::optional<ModelProfile> ProfileCache::model() const {
  return read("model", model_key_, model_from);
}

void ProfileCache::keep(const MachineProfile& profile) const {
  write("machine", machine_key_, to_json(profile).dump());
}

void ProfileCache::keep(const ModelProfile& profile) const {
  write("model", model_key_, to_json(profile).dump());
}

}  // namespace tierflow

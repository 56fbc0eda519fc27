#include "runtime/state/script_model.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string_view>

#include "runtime/base/exception.h"
#include "runtime/base/files.h"
#include "runtime/checkpoint/result_folder.h"
#include "runtime/checkpoint/safetensors_header.h"

namespace tierflow {
namespace {

using nlohmann::json;

constexpr const char* kConfig = "config.json";
constexpr const char* kAdapterConfig = "adapter_config.json";
constexpr std::string_view kModel = "model.";  // before the names of parameters and buffers beside a commit

std::vector<SavedPart> parts_of(const json& list) {
  std::vector<SavedPart> parts;
  for (const json& part : list)
    parts.push_back({.name = part.at(0).get<std::string>(), .shape = part.at(1).get<std::vector<std::int64_t>>()});
  return parts;
}

std::uint64_t elements_of(const std::vector<std::int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), std::uint64_t{1}, std::multiplies<>());
}

bool is_floating(const std::string& dtype) {
  return dtype == "F32" || dtype == "BF16" || dtype == "F16" || dtype == "F64";
}

// The header's text of a safetensors file; its tensors' bytes begin 8 bytes and this text later.
std::string_view header_in(std::string_view file, const std::string& where) {
  std::uint64_t length = 0;
  if (file.size() >= sizeof length) std::memcpy(&length, file.data(), sizeof length);
  if (file.size() < sizeof length || length > file.size() - sizeof length)
    fail(io::ErrorKind::corruption, where, "what lies beside the state is no safetensors file");
  return file.substr(sizeof length, length);
}

}  // namespace

ScriptModel::ScriptModel(std::string beside, const std::vector<UnitSpec>& units, const std::string& where)
    : beside_(std::move(beside)) {
  const std::string_view header = header_in(beside_, where);
  const auto bytes = std::as_bytes(std::span(beside_)).subspan(sizeof(std::uint64_t) + header.size());
  std::map<std::string, Source> ordinary;
  for (const HeaderEntry& entry : parse_safetensors_header(header, bytes.size(), where))
    if (entry.name.starts_with(kModel) && is_floating(entry.dtype))
      ordinary[entry.name.substr(kModel.size())] = {.dtype = entry.dtype,
                                                    .bytes = bytes.subspan(entry.begin, entry.end - entry.begin),
                                                    .parts = {{entry.name.substr(kModel.size()), entry.shape}}};
  try {
    const json metadata = json::parse(header).value("__metadata__", json::object());
    read_result(metadata.value("result", R"({"why": "the state is of an earlier version"})"), units, ordinary);
  } catch (const json::exception& error) {
    fail(io::ErrorKind::corruption, where,
         std::string("what lies beside the state does not say how its model is saved: ") + error.what());
  }
  for (auto& [name, source] : ordinary) {
    std::uint64_t elements = 0;
    for (const SavedPart& part : source.parts) elements += elements_of(part.shape);
    if (source.parts.empty()) continue;
    if (elements != 0 && source.bytes.size() % elements != 0)
      fail(io::ErrorKind::corruption, where, name + " beside the state is saved in parts that are not the whole");
    ordinary_.push_back(std::move(source));
  }
}

void ScriptModel::read_result(const std::string& result, const std::vector<UnitSpec>& units,
                              std::map<std::string, Source>& ordinary) {
  const json said = json::parse(result);
  if (said.contains("why")) {
    name_plainly(units);
    remark_ = "the folder has the tensors under the names that they have in the script, and no config.json: " +
              said.at("why").get<std::string>() + (remark_.empty() ? "" : "; " + remark_);
    return;
  }
  const bool adapter = said.at("adapter").get<bool>();
  for (const auto& [name, text] : said.at("files").items()) {
    if (name.empty() || name.front() == '.' || name.find('/') != std::string::npos)
      throw json::other_error::create(501, "a file is named " + printable(name), nullptr);
    if (name == (adapter ? kAdapterConfig : kConfig)) {
      last_file_ = name;
      last_text_ = text.get<std::string>();
    } else {
      files_.emplace_back(name, text.get<std::string>());
    }
  }
  folder_ = said.value("folder", "");
  for (const json& unit : said.at("streamed")) {
    auto& tensors = streamed_.emplace_back();
    for (const json& tensor : unit) tensors.push_back(parts_of(tensor));
  }
  bool fits = streamed_.size() == units.size();
  for (std::size_t unit = 0; fits && unit < units.size(); ++unit)
    fits = streamed_[unit].size() == units[unit].tensors.size();
  if (!fits) throw json::other_error::create(501, "it is of other units", nullptr);
  for (auto& [name, source] : ordinary) source.parts.clear();
  for (const auto& [name, parts] : said.at("beside").items()) {
    const auto found = ordinary.find(name);
    if (found == ordinary.end()) throw json::other_error::create(501, printable(name) + " is not there", nullptr);
    found->second.parts = parts_of(parts);
  }
  if (last_file_.empty())
    remark_ = "the model is the script's own: the folder has its tensors as safetensors, and no config.json";
}

void ScriptModel::name_plainly(const std::vector<UnitSpec>& units) {
  std::size_t left_out = 0;
  for (const UnitSpec& unit : units) {
    auto& tensors = streamed_.emplace_back();
    for (const TensorSpec& tensor : unit.tensors) {
      auto& parts = tensors.emplace_back();
      if (tensor.format == WeightFormat::bf16)
        parts.push_back({.name = tensor.name, .shape = tensor.shape});
      else
        ++left_out;
    }
  }
  if (left_out != 0)
    remark_ = std::to_string(left_out) + " tensors that do not train and are stored in fewer bytes are left out";
}

bool ScriptModel::has_streamed() const {
  return std::ranges::any_of(streamed_, [](const auto& unit) {
    return std::ranges::any_of(unit, [](const auto& parts) { return !parts.empty(); });
  });
}

std::string ScriptModel::write(const std::vector<UnitSpec>& units, const PackedModel& packed,
                               const swap::Layout& layout, const std::filesystem::path& folder, const ReadChunk& read,
                               const Progress& progress, const BeforeMove& before_move) const {
  std::vector<TensorHeader> headers = headers_of(units, packed, streamed_);
  for (const Source& source : ordinary_) {
    std::uint64_t elements = 0;
    for (const SavedPart& part : source.parts) elements += elements_of(part.shape);
    for (const SavedPart& part : source.parts)
      headers.push_back({.name = part.name,
                         .shape = part.shape,
                         .stored_dtype = source.dtype,
                         .stored_bytes = elements == 0 ? 0 : source.bytes.size() / elements * elements_of(part.shape)});
  }
  std::error_code ignored;
  if (!folder_.empty() && std::filesystem::is_directory(folder_, ignored)) CompanionFiles(folder_).copy_to(folder);
  for (const auto& [name, text] : files_) write_text(folder / name, text);
  CheckpointWriter writer = last_file_ == kAdapterConfig
                                ? CheckpointWriter(folder, std::move(headers), CheckpointWriter::Adapter{})
                                : CheckpointWriter(folder, std::move(headers));
  if (before_move) writer.before_each_move(before_move);
  if (has_streamed())
    write_weights(
        writer, units, packed, layout, [&](int unit, int tensor) { return !streamed_[unit][tensor].empty(); }, read,
        "exporting", progress);
  for (const Source& source : ordinary_) writer.write(source.bytes);
  writer.finish(last_text_);
  return writer.not_finite();
}

std::optional<ScriptModel> script_in(const StoredModel& model, const Folders& storage) {
  if (!model.spec.config_json.empty()) return {};
  const json progress = json::parse(model.store->progress(), nullptr, false);
  const std::string checksum = progress.is_object() ? progress.value("beside", "") : "";
  return ScriptModel(read_beside(storage, model.store->generation(), checksum), model.spec.units,
                     storage.front().string());
}

}  // namespace tierflow

#include "runtime/planning/stored_model.h"

#include <nlohmann/json.hpp>

#include "runtime/base/exception.h"
#include "runtime/planning/missed_updates.h"
#include "runtime/spec/trainable.h"
#include "runtime/spec/unit_list.h"

namespace tierflow {
namespace {

ModelSpec stored_spec(const nlohmann::json& identity, const std::string& where) {
  if (identity.is_object() && identity.contains("units")) {
    ModelSpec spec;
    spec.units = parse_unit_list(identity["units"], where);
    return spec;
  }
  const auto tiling = identity.find("tiling");
  if (!identity.is_object() || !identity.contains("config") || tiling == identity.end() || !tiling->is_array() ||
      tiling->size() < 2 || tiling->size() > 3 || !(*tiling)[0].is_number_integer() ||
      !(*tiling)[1].is_number_integer() || (tiling->size() == 3 && (*tiling)[2] != "experts apart"))
    throw Exception(io::Error{
        .kind = io::ErrorKind::corruption, .path = where, .detail = "the store does not say which model it holds"});
  ModelSpec spec = parse_model_spec(
      identity.value("config", ""), where,
      {.vocabulary_elements = (*tiling)[0], .block_elements = (*tiling)[1], .experts_apart = tiling->size() == 3},
      identity.value("as", ""));
  ModelSpec like;
  like.adapter_config_json = identity.value("adapter", "");
  like.trainable_json = identity.value("trainable", "");
  like.base_format = parse_weight_format(identity.value("base", "bf16"));
  like.base_plain = identity.value("base_plain", std::vector<std::string>());
  train_as(spec, like);
  return spec;
}

}  // namespace

std::optional<NotedSource> source_in(const nlohmann::json& progress) {
  const auto found = progress.is_object() ? progress.find("source") : progress.end();
  if (!progress.is_object() || found == progress.end() || !found->is_object()) return std::nullopt;
  return NotedSource{.folder = found->value("folder", ""), .hash = found->value("hash", std::uint64_t{0})};
}

nlohmann::json source_json(const NotedSource& source) {
  return {{"folder", source.folder.string()}, {"hash", source.hash}};
}

StoredModel open_stored_model(const Folders& storage) {
  swap::StoreOptions options{.volume = {.folders = storage, .allow_buffered = true, .allow_any_filesystem = true}};
  StoredModel found{.contents = value_or_throw(swap::Store::inspect(options.volume))};
  const auto identity = nlohmann::json::parse(found.contents.identity, nullptr, false);
  if (found.contents.generation == 0)
    throw Exception(io::Error{.kind = io::ErrorKind::corruption,
                              .path = storage.front().string(),
                              .detail = "the store holds no committed state: the run that made it ended before its "
                                        "first commit"});
  found.spec = stored_spec(identity, storage.front().string());
  found.source = source_in(nlohmann::json::parse(found.contents.progress, nullptr, false));
  found.packed =
      pack(found.spec, parse_precision(identity.value("precision", "")), embedding_part_of(found.contents.identity));
  std::vector<swap::UnitShape> shapes;
  for (const PackedUnit& unit : found.packed.units) shapes.push_back(unit.shape);
  found.layout = std::make_unique<swap::Layout>(std::move(shapes), found.packed.stages, found.contents.chunk_elements);
  options.generations = found.contents.generations;
  options.identity = found.contents.identity;
  options.check_beside = [storage](std::uint64_t generation, const std::string& progress) {
    return check_beside(storage, generation, progress);
  };
  found.store = value_or_throw(swap::Store::open(std::move(options), *found.layout));
  return found;
}

}  // namespace tierflow

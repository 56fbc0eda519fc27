#pragma once
// A model in a store that a run left, opened for reading. No torch here.
#include <cstdint>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "runtime/planning/left_store.h"
#include "runtime/spec/model_spec.h"
#include "runtime/spec/packing.h"
#include "swap/store.h"

namespace tierflow {

// The folder of which a run's result takes other parts than the language model, and their hash when the run began.
struct NotedSource {
  std::filesystem::path folder;
  std::uint64_t hash = 0;
};
// What Session's progress says of it; nothing if there is none.
std::optional<NotedSource> source_in(const nlohmann::json& progress);
nlohmann::json source_json(const NotedSource& source);

struct StoredModel {
  swap::Store::Contents contents;
  ModelSpec spec;
  std::optional<NotedSource> source;
  PackedModel packed;
  std::unique_ptr<swap::Layout> layout;
  std::unique_ptr<swap::Store> store;  // last: refers to the layout
};

// Throws Exception: kind locked where a process holds the store, corruption where nothing can be read.
StoredModel open_stored_model(const Folders& storage);

}  // namespace tierflow

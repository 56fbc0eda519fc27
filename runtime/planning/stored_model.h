#pragma once
// A model in a store that a run left, opened for reading. No torch here.
#include <memory>

#include "runtime/planning/left_store.h"
#include "runtime/spec/model_spec.h"
#include "runtime/spec/packing.h"
#include "swap/store.h"

namespace tierflow {

struct StoredModel {
  swap::Store::Contents contents;
  ModelSpec spec;
  PackedModel packed;
  std::unique_ptr<swap::Layout> layout;
  std::unique_ptr<swap::Store> store;  // last: refers to the layout
};

// Throws Exception: kind locked where a process holds the store, corruption where nothing can be read.
StoredModel open_stored_model(const Folders& storage);

}  // namespace tierflow

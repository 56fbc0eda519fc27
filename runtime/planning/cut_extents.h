#pragma once
// Reads a store's extents as chunks of another size. The content does not change.
#include <optional>

#include "io/buffer.h"
#include "runtime/base/exception.h"
#include "runtime/planning/stored_model.h"

namespace tierflow {

// Both outlive this; they have the same units.
class CutExtents {
 public:
  CutExtents(const StoredModel& from, const swap::Layout& to) : from_(from), to_(to) {}
  // The bytes of an extent of the new cut; nothing if the store has none there. Extents of the store are read and
  // verified whole; each is read once if the calls for a kind come in the order of their chunks. Throws Exception.
  std::optional<io::Buffer> extent(swap::ExtentKind kind, int chunk);

 private:
  io::Buffer fetch(swap::ExtentKind kind, int chunk) { return value_or_throw(from_.store->fetch(kind, chunk)); }

  const StoredModel& from_;
  const swap::Layout& to_;
  io::Buffer last_;  // the extent fetched last; later calls may need more of it
  swap::ExtentKind last_kind_ = swap::ExtentKind::hi;
  int last_chunk_ = -1;
};

}  // namespace tierflow

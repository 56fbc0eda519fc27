#pragma once
// The store of a durable Streamer: what lies in its folders, whether that is of the same run, and the commits of a
// client that keeps bytes of its own beside the weights and their state. Throws Exception.
#include <memory>
#include <optional>

#include "runtime/stream/streamer.h"
#include "swap/store.h"

namespace tierflow {

// Finds what an earlier durable Streamer over these units committed in options.storage; nothing where there is none.
// What lies in other folders is brought into these, what ended before its first commit is removed. Throws where a
// process holds it, where it is damaged, and where it is not this run's, saying what differs. say: hears of a move,
// when it begins or when the end of one is made up for.
std::optional<swap::Store::Contents> find_durable(const std::vector<UnitSpec>& units, const StreamerOptions& options,
                                                  const Progress& progress, const Say& say);

// JSON for swap::StoreOptions::identity: what has to be equal to go on.
std::string durable_identity(const std::vector<UnitSpec>& units, const StreamerOptions& options);

// Writes what the client adds to the store's next generation, durably, beside the store. Returns what
// swap::Store::commit() takes for it. The generation that is durable is the newest that was planned.
std::string keep_commit(const swap::Store& store, const StreamerOptions& options, const StreamerCommit& commit);
// What the client added to the store's present generation.
StreamerCommit committed_in(const swap::Store& store, const StreamerOptions& options);

}  // namespace tierflow

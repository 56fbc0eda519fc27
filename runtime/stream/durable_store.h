#pragma once
// The store of a durable Streamer: finds what lies in its folders, checks that it belongs to the same run, and commits
// together with bytes of the client's own. Throws Exception.
#include <memory>
#include <optional>

#include "runtime/stream/streamer.h"
#include "swap/store.h"

namespace tierflow {

// Finds what an earlier durable Streamer over these units committed in options.storage; nothing if there is none.
// What lies in other folders is brought into these, what ended before its first commit is removed. Throws where a
// process holds it, where it is damaged, and where it is not this run's, saying what differs. say: hears of a move,
// when it begins or when the end of one is made up for.
std::optional<swap::Store::Contents> find_durable(const std::vector<UnitSpec>& units, const StreamerOptions& options,
                                                  const Progress& progress, const Say& say);

// JSON for swap::StoreOptions::identity: what must be equal to resume.
std::string durable_identity(const std::vector<UnitSpec>& units, const StreamerOptions& options);

// Writes what the client adds to the store's next generation, durably, beside the store. Returns what
// swap::Store::commit() takes for it. The generation that is durable is the newest that was planned.
std::string keep_commit(const swap::Store& store, const StreamerOptions& options, const StreamerCommit& commit);
// What the client added to the store's current generation.
StreamerCommit committed_in(const swap::Store& store, const StreamerOptions& options);

}  // namespace tierflow

#pragma once
// The log-probabilities that a preference loss is relative to, in a file beside the state: they are those of the model
// before the first step, so a run that is gone on with cannot compute them again.
//
// The file, little-endian: "TFREFER\n"; u64 length of the run's identity, u64 sequences, u64 XXH3 of all that follows
// it; the identity; a double for each sequence, by number.
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "runtime/planning/left_store.h"

namespace tierflow {

// Bytes of a pair: in the file, and in RAM while that is written.
inline constexpr std::uint64_t kReferenceFile = 16, kReferenceRam = 2 * kReferenceFile;

// Durable when it returns. Throws Exception.
void write_reference(const std::filesystem::path& path, const std::string& identity,
                     const std::vector<double>& reference);

// sequences: how many there have to be; none: any number. Throws Exception (kind corruption) where the file is missing,
// damaged or another run's.
std::vector<double> read_reference(const std::filesystem::path& path, const std::string& identity,
                                   std::optional<std::int64_t> sequences);

// Throws as read_reference() where the state is of a run that goes on with a reference, and this is not whole.
void verify_reference(const Folders& storage, const LeftStore& left);

}  // namespace tierflow

#pragma once
// The reference of a preference loss, in a file beside the state: the log-probabilities of the model before the first
// step. A resumed run cannot compute them again.
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

// Bytes for each pair: in the file, and in RAM while the file is written.
inline constexpr std::uint64_t kReferenceFile = 16, kReferenceRam = 2 * kReferenceFile;

// Durable when it returns. Throws Exception.
void write_reference(const std::filesystem::path& path, const std::string& identity,
                     const std::vector<double>& reference);

// sequences: how many the file must have; none: any number. Throws Exception (kind corruption) if the file is missing,
// damaged or another run's.
std::vector<double> read_reference(const std::filesystem::path& path, const std::string& identity,
                                   std::optional<std::int64_t> sequences);

// If the state belongs to a run with a reference: throws as read_reference() if the reference is not whole.
void verify_reference(const Folders& storage, const LeftStore& left);

}  // namespace tierflow

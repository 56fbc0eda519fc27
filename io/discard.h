#pragma once
// For the remains of volumes that cannot be opened or that lack files: finds out what they are, and removes them.
#include <array>
#include <cstdint>
#include <filesystem>
#include <optional>

#include "io/volume.h"

namespace tierflow::io {

// Removes the data files that an earlier Volume left in the folders, whole or not; it is no error if some are missing.
// If another process holds one (kind locked), nothing is removed; with read_only, processes that only read it do not
// count.
Error discard(const VolumeOptions& options);

// Whether a Volume::create() was interrupted in these folders, so that nobody can have written to its files: there is a
// data file without any header. (Files get their headers when all files exist.) An error of kind locked if another
// process holds a file.
Result<bool> creation_was_interrupted(const VolumeOptions& options);

// A volume that a data file belongs to.
struct Membership {
  std::array<std::uint64_t, 2> volume{};
  std::uint32_t count = 0;  // of its members
  bool operator==(const Membership&) const = default;
};
// The volume of the data file `options.name` in the folder; nothing if there is no such file or its header cannot be
// read. An error of kind locked if another process holds it.
Result<std::optional<Membership>> membership(const VolumeOptions& options, const std::filesystem::path& folder);

}  // namespace tierflow::io

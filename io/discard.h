#pragma once
// What is left of volumes that cannot be opened, or that miss files: finding out what it is, and removing it.
#include <array>
#include <cstdint>
#include <filesystem>
#include <optional>

#include "io/volume.h"

namespace tierflow::io {

// Removes the data files that an earlier Volume left in the folders, whole or not; those that are missing do not
// matter. Where another process holds one (kind locked), nothing is removed; with read_only, those who read it do not
// matter.
Error discard(const VolumeOptions& options);

// Whether what lies in the folders is of a Volume::create() that never came to its end, so that nobody can have written
// to it: a data file without any header. Files get their headers when all of them are there. An error of kind locked
// where another process holds one.
Result<bool> creation_was_interrupted(const VolumeOptions& options);

// A volume that a data file belongs to.
struct Membership {
  std::array<std::uint64_t, 2> volume{};
  std::uint32_t count = 0;  // of its members
  bool operator==(const Membership&) const = default;
};
// Of the data file `options.name` in the folder; nothing where there is none or its header cannot be read. An error of
// kind locked where another process holds it.
Result<std::optional<Membership>> membership(const VolumeOptions& options, const std::filesystem::path& folder);

}  // namespace tierflow::io

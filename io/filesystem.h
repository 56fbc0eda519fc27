#pragma once
// Facts about file systems: which of them cannot hold a data file, what others fail to do for it, and how to flush a
// folder on any of them.
#include <cstdint>
#include <filesystem>
#include <string>

#include "io/error.h"

namespace tierflow::io {

// An error of kind environment if `directory` lies in RAM, on a network or behind a layer that hides the drive; of kind
// input if there is none of that name.
Error check_filesystem(const std::filesystem::path& directory);
// The same for a file system that statfs() calls `type`.
Error check_filesystem_type(std::uint32_t type, const std::filesystem::path& directory);

// What a file system of this type does not do although it says so, with the remedy; empty for all others.
std::string filesystem_remark(std::uint32_t type);
bool copies_on_write(std::uint32_t type);  // unless a file says otherwise (FS_NOCOW_FL)

// Makes a new or removed name in `directory` survive a power cut, if the file system can flush a folder at all.
Error sync_directory(const std::filesystem::path& directory);

}  // namespace tierflow::io

#pragma once
// The generations that a store's volume holds: superblocks and manifests, and the order in which a commit writes them.
#include <cstdint>
#include <string>
#include <vector>

#include "io/volume.h"
#include "swap/store_format.h"

namespace tierflow::swap {

struct Generation {
  Superblock block;
  Manifest manifest;
  std::string text;         // the manifest's
  std::string passed_over;  // why it may not be the newest that was committed; empty: it is
  io::Error unreadable;     // where that is for a reading that failed, and not for what was read
};

// The generations whose superblock and manifest can be read, newest first; none where nothing was ever committed. An
// error where there was something and none can be read. Writes nothing.
io::Result<std::vector<Generation>> readable_generations(io::Volume& volume);

// Manifest, flush, superblock, flush: when it returns, the generation is durable. What the manifest refers to was
// written and completed before. After an error nobody knows whether it is durable. Once more for the same generation
// writes the same bytes to the same places.
io::Error publish_generation(io::Volume& volume, const Superblock& block, const std::string& manifest);

// One request, waited for.
io::Error transfer(io::Volume& volume, io::Op op, std::uint64_t offset, io::Buffer& buffer, std::size_t length);
// `bytes` from `offset`, which is a multiple of kSector; the buffer is as much longer as a sector asks for.
io::Result<io::Buffer> read_at(io::Volume& volume, std::uint64_t offset, std::uint64_t bytes);

}  // namespace tierflow::swap

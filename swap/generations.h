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
  std::string text;         // of the manifest
  std::string passed_over;  // why a newer generation may have been committed; empty: this is the newest
  io::Error unreadable;  // set if passed_over is because of a read that failed, not because of the bytes that were read
  bool damaged = false;  // passed_over is because of what cannot be read; else a crash explains it too
};

// The generations whose superblock and manifest can be read, newest first; none if nothing was ever committed. An error
// if something was committed and none can be read. Writes nothing.
io::Result<std::vector<Generation>> readable_generations(io::Volume& volume);

// Writes the manifest, flushes, writes the superblock, flushes. Then the generation is durable. Everything that the
// manifest refers to must have been written before. After an error it is not known whether the generation is durable.
// Calling it again for the same generation writes the same bytes to the same places.
io::Error publish_generation(io::Volume& volume, const Superblock& block, const std::string& manifest);

// Makes one request and waits for it.
io::Error transfer(io::Volume& volume, io::Op op, std::uint64_t offset, io::Buffer& buffer, std::size_t length);
// Reads `bytes` from `offset`, which is a multiple of kSector. The buffer is rounded up to a multiple of kSector.
io::Result<io::Buffer> read_at(io::Volume& volume, std::uint64_t offset, std::uint64_t bytes);

}  // namespace tierflow::swap

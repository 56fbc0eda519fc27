#pragma once
// Checksums that cover the identity of an extent too. They are taken where data is produced and verified where it is
// used. So they show when bytes changed on the way, lie in the wrong place, or belong to another run or generation.
#include <cstddef>
#include <cstdint>
#include <span>

namespace tierflow::io {

// XXH3-64 of the bytes alone. The same on every machine.
std::uint64_t content_hash(std::span<const std::byte> bytes);

// The hash of the bytes bound to the identity of the extent that holds them: different for any other run, extent,
// generation or length. Any thread.
std::uint64_t extent_checksum(std::uint64_t run_id, std::uint64_t extent_id, std::uint64_t generation,
                              std::span<const std::byte> bytes);
// The same for `length` bytes whose content_hash() is `content`.
std::uint64_t extent_checksum(std::uint64_t run_id, std::uint64_t extent_id, std::uint64_t generation,
                              std::uint64_t length, std::uint64_t content);

}  // namespace tierflow::io

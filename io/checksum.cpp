#include "io/checksum.h"

#include <xxhash.h>

namespace tierflow::io {

#if defined(__x86_64__)
unsigned long long content_hash_avx2(const void* data, unsigned long size);  // checksum_avx2.cpp
#endif

std::uint64_t content_hash(std::span<const std::byte> bytes) {
#if defined(__x86_64__)
  static const bool avx2 = __builtin_cpu_supports("avx2") != 0;
  if (avx2) return content_hash_avx2(bytes.data(), bytes.size());
#endif
  return XXH3_64bits(bytes.data(), bytes.size());
}

std::uint64_t extent_checksum(std::uint64_t run_id, std::uint64_t extent_id, std::uint64_t generation,
                              std::span<const std::byte> bytes) {
  return extent_checksum(run_id, extent_id, generation, bytes.size(), content_hash(bytes));
}

std::uint64_t extent_checksum(std::uint64_t run_id, std::uint64_t extent_id, std::uint64_t generation,
                              std::uint64_t length, std::uint64_t content) {
  const std::uint64_t identity[] = {run_id, extent_id, generation, length, content};
  return XXH3_64bits(identity, sizeof identity);
}

}  // namespace tierflow::io

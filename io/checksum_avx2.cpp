// XXH3-64 compiled for AVX2, which on many machines outruns both the baseline and the AVX-512 build of the library.
// This file alone is compiled with -mavx2; nothing in it runs before the processor was asked.
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace tierflow::io {

unsigned long long content_hash_avx2(const void* data, unsigned long size) {
  return XXH3_64bits(data, size);
}

}  // namespace tierflow::io

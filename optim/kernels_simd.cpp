// The vector kernels, compiled once for each instruction set that has fused multiply-add.
#include <vector>
#ifdef __aarch64__
#include <sys/auxv.h>
#endif

// Sets without an advantage over their neighbours, or with vectors of unknown length; those without fused multiply-add
// run the scalar kernels.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/kernels_simd.cpp"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "optim/update-inl.h"

#if HWY_ONCE
namespace tierflow::optim {
namespace {

std::vector<Kernels> find_kernels() {
  std::vector<Kernels> found;
#if HWY_TARGETS & (HWY_AVX3 | HWY_AVX2)
  const auto supported = hwy::SupportedTargets();
#endif
#if HWY_TARGETS & HWY_AVX3
  if ((supported & HWY_AVX3) != 0) found.push_back(N_AVX3::vector_kernels("AVX3"));
#endif
#if HWY_TARGETS & HWY_AVX2
  if ((supported & HWY_AVX2) != 0) found.push_back(N_AVX2::vector_kernels("AVX2"));
#endif
#if HWY_TARGETS & HWY_NEON  // which Highway compiles with the AES instructions
  if ((getauxval(AT_HWCAP) & HWCAP_AES) != 0) found.push_back(N_NEON::vector_kernels("NEON"));
#endif
  found.push_back({"SCALAR", update_blocks_scalar, sum_segment_scalar, encode_block_scalar, decode_block_scalar});
  return found;
}

}  // namespace

std::span<const Kernels> all_kernels() {
  static const std::vector<Kernels> found = find_kernels();
  return found;
}

}  // namespace tierflow::optim
#endif  // HWY_ONCE

#include "runtime/spec/weight_kernels.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "runtime/spec/weight_codes.h"

// Sets without an advantage over their neighbours, or with vectors of unknown length.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "runtime/spec/weight_kernels.cpp"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace tierflow::weights::HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128

std::uint32_t largest_magnitude(const float* values, std::size_t n) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < n; ++i) largest = std::max(largest, std::bit_cast<std::uint32_t>(values[i]) & kMagnitude);
  return largest;
}

bool encode_nf4(const float* values, std::size_t blocks, std::uint8_t* codes, float* absmax) {
  std::uint32_t largest = 0;
  for (std::size_t block = 0; block < blocks; ++block, values += kNf4Block) {
    const std::uint32_t bits = largest_magnitude(values, kNf4Block);
    largest = std::max(largest, bits);
    absmax[block] = std::bit_cast<float>(bits);
    const float inverse = 1 / std::max(absmax[block], kSmallestDivisor);
    for (std::size_t i = 0; i < kNf4Block; i += 2) {
      const int first = kNf4.code(values[i] * inverse), second = kNf4.code(values[i + 1] * inverse);
      *codes++ = static_cast<std::uint8_t>(first << 4 | second);
    }
  }
  return largest < kInfinity;
}

bool encode_int8(const float* values, std::size_t blocks, std::uint8_t* codes, float* absmax) {
  std::uint32_t largest = 0;
  for (std::size_t block = 0; block < blocks; ++block, values += kInt8Block) {
    const std::uint32_t bits = largest_magnitude(values, kInt8Block);
    largest = std::max(largest, bits);
    absmax[block] = std::bit_cast<float>(bits);
    if (largest >= kInfinity) return false;
    const float divisor = bits == 0 ? 1.0F : absmax[block];
    for (std::size_t i = 0; i < kInt8Block; ++i)
      *codes++ = static_cast<std::uint8_t>(static_cast<std::int8_t>(std::nearbyint(values[i] / divisor * 127.0F)));
  }
  return true;
}

void decode_int8(const std::uint8_t* codes, float scale, std::size_t n, std::uint16_t* words) {
  for (std::size_t i = 0; i < n; ++i)
    words[i] = rounded(static_cast<float>(static_cast<std::int8_t>(codes[i])) * scale);
}

void decode_e4m3(const std::uint8_t* codes, float scale, std::size_t n, std::uint16_t* words) {
  for (std::size_t i = 0; i < n; ++i) words[i] = rounded_away(e4m3(codes[i]) * scale);
}

void decode_mxfp4(const std::uint8_t* codes, const std::uint8_t* scales, std::size_t n, std::uint16_t* words) {
  for (std::size_t i = 0; i < n; i += 2) {
    words[i] = rounded(e2m1(codes[i / 2]) * e8m0(scales[i]));
    words[i + 1] = rounded(e2m1(codes[i / 2] >> 4) * e8m0(scales[i + 1]));
  }
}

void decode_nf4(const std::uint8_t* codes, const float* absmax, std::size_t blocks, std::uint16_t* words) {
  for (std::size_t block = 0; block < blocks; ++block) {
    std::uint16_t entries[16];
    for (int i = 0; i < 16; ++i) entries[i] = rounded(kNf4.at[i] * absmax[block]);
    for (std::size_t i = 0; i < kNf4Block; i += 2, ++codes) {
      *words++ = entries[*codes >> 4];
      *words++ = entries[*codes & 15U];
    }
  }
}

#else

namespace hn = hwy::HWY_NAMESPACE;

using F = hn::ScalableTag<float>;
using I = hn::RebindToSigned<F>;
using U = hn::RebindToUnsigned<F>;
using Words = hn::Rebind<std::uint16_t, F>;
using Bytes = hn::Rebind<std::uint8_t, F>;
using SignedBytes = hn::Rebind<std::int8_t, F>;
using VF = hn::Vec<F>;
using VU = hn::Vec<U>;

// As bits: the largest is that of a NaN or an infinity where there is one.
HWY_INLINE std::uint32_t largest_magnitude(const float* values, std::size_t n) {
  const auto magnitude = hn::Set(I(), static_cast<std::int32_t>(kMagnitude));
  auto largest = hn::Zero(I());
  for (std::size_t i = 0; i < n; i += hn::Lanes(F()))
    largest = hn::Max(largest, hn::And(hn::BitCast(I(), hn::LoadU(F(), values + i)), magnitude));
  return static_cast<std::uint32_t>(hn::GetLane(hn::MaxOfLanes(I(), largest)));
}

#if HWY_TARGET <= HWY_AVX2
// The edges as a search tree: below node k lie 2k and 2k + 1, and the leaf of a code is 16 more than it. Vectors of
// eight hold the tree's last level alone, for the lookup sees three bits of a node.
struct Nf4Tree {
  float at[16] = {}, last[16] = {};
  constexpr Nf4Tree() {
    for (int node = 1; node < 16; ++node) {
      int level = 1;
      while (level * 2 <= node) level *= 2;
      at[node] = kNf4.edges[(2 * (node - level) + 1) * (8 / level) - 1];
      if (level == 8) last[node - 8] = last[node] = at[node];
    }
  }
};
alignas(64) inline constexpr Nf4Tree kNf4Tree;

HWY_INLINE VU nf4_codes(VF value) {
  const VF tree = hn::Load(F(), kNf4Tree.at), last = hn::Load(F(), kNf4Tree.last);
  const VU low = hn::Set(U(), 7U);
  VU node = hn::Set(U(), 1U);
  for (int level = 0; level < 4; ++level) {
    const auto at = hn::IndicesFromVec(F(), level < 3 ? node : hn::And(node, low));
    const VF edge = hn::TableLookupLanes(level < 3 ? tree : last, at);
    node = hn::Sub(hn::Add(node, node), hn::BitCast(U(), hn::VecFromMask(F(), hn::Gt(value, edge))));
  }
  return hn::Sub(node, hn::Set(U(), 16U));
}
#else
HWY_INLINE VU nf4_codes(VF value) {
  VU code = hn::Zero(U());
  for (const float edge : kNf4.edges)
    code = hn::Sub(code, hn::BitCast(U(), hn::VecFromMask(F(), hn::Gt(value, hn::Set(F(), edge)))));
  return code;
}
#endif

// The first of each two codes in the upper half of the first's byte.
HWY_INLINE VU pairs(VU codes) {
  const hn::Repartition<std::uint64_t, U> wide;
  const auto both = hn::BitCast(wide, codes);
  return hn::BitCast(U(), hn::Or(hn::ShiftLeft<4>(both), hn::ShiftRight<32>(both)));
}

bool encode_nf4(const float* values, std::size_t blocks, std::uint8_t* codes, float* absmax) {
  const std::size_t lanes = hn::Lanes(F());
  std::uint32_t largest = 0;
  for (std::size_t block = 0; block < blocks; ++block, values += kNf4Block) {
    const std::uint32_t bits = largest_magnitude(values, kNf4Block);
    largest = std::max(largest, bits);
    absmax[block] = std::bit_cast<float>(bits);
    const VF inverse = hn::Set(F(), 1 / std::max(absmax[block], kSmallestDivisor));
    for (std::size_t i = 0; i < kNf4Block; i += 2 * lanes, codes += lanes) {
      const VU first = nf4_codes(hn::Mul(hn::LoadU(F(), values + i), inverse));
      const VU second = nf4_codes(hn::Mul(hn::LoadU(F(), values + i + lanes), inverse));
      hn::StoreU(hn::U8FromU32(hn::ConcatEven(U(), pairs(second), pairs(first))), Bytes(), codes);
    }
  }
  return largest < kInfinity;
}

bool encode_int8(const float* values, std::size_t blocks, std::uint8_t* codes, float* absmax) {
  const std::size_t lanes = hn::Lanes(F());
  std::uint32_t largest = 0;
  for (std::size_t block = 0; block < blocks; ++block, values += kInt8Block, codes += kInt8Block) {
    const std::uint32_t bits = largest_magnitude(values, kInt8Block);
    largest = std::max(largest, bits);
    absmax[block] = std::bit_cast<float>(bits);
    const VF divisor = hn::Set(F(), bits == 0 ? 1.0F : absmax[block]), top = hn::Set(F(), 127.0F);
    for (std::size_t i = 0; i < kInt8Block; i += lanes) {
      const auto code = hn::NearestInt(hn::Mul(hn::Div(hn::LoadU(F(), values + i), divisor), top));
      hn::StoreU(hn::BitCast(Bytes(), hn::DemoteTo(SignedBytes(), code)), Bytes(), codes + i);
    }
  }
  return largest < kInfinity;
}

// bf16 words in the lower halves of the lanes.
HWY_INLINE VU rounded_words(VF value) {
  const VU bits = hn::BitCast(U(), value);
  const VU odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(U(), 1U));
  const VU word = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(U(), 0x7fffU))));
  return hn::IfThenElse(hn::RebindMask(U(), hn::IsNaN(value)), hn::Set(U(), std::uint32_t{kNan}), word);
}

void decode_int8(const std::uint8_t* codes, float scale, std::size_t n, std::uint16_t* words) {
  const std::size_t lanes = hn::Lanes(F());
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const VF code = hn::ConvertTo(F(), hn::PromoteTo(I(), hn::BitCast(SignedBytes(), hn::LoadU(Bytes(), codes + i))));
    hn::StoreU(hn::TruncateTo(Words(), rounded_words(hn::Mul(code, hn::Set(F(), scale)))), Words(), words + i);
  }
  for (; i < n; ++i) words[i] = rounded(static_cast<float>(static_cast<std::int8_t>(codes[i])) * scale);
}

HWY_INLINE VF e4m3_values(VU code) {
  const VU magnitude = hn::And(code, hn::Set(U(), 0x7fU)), sign = hn::ShiftLeft<24>(hn::Xor(code, magnitude));
  const VU bits = hn::Add(hn::ShiftLeft<20>(magnitude), hn::Set(U(), 120U << 23));
  const VF small = hn::Sub(hn::BitCast(F(), hn::Add(bits, hn::Set(U(), 1U << 23))), hn::Set(F(), 0x1p-6F));
  const auto signed_magnitude = hn::BitCast(I(), magnitude);
  VU value =
      hn::IfThenElse(hn::RebindMask(U(), hn::Lt(signed_magnitude, hn::Set(I(), 8))), hn::BitCast(U(), small), bits);
  value = hn::IfThenElse(hn::Eq(magnitude, hn::Set(U(), 0x7fU)), hn::Set(U(), 0x7fc00000U), value);
  return hn::BitCast(F(), hn::Or(value, sign));
}

void decode_e4m3(const std::uint8_t* codes, float scale, std::size_t n, std::uint16_t* words) {
  const std::size_t lanes = hn::Lanes(F());
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const VF value = e4m3_values(hn::PromoteTo(U(), hn::LoadU(Bytes(), codes + i)));
    const VF product = hn::Mul(value, hn::Set(F(), scale));
    const VU away = hn::ShiftRight<16>(hn::Add(hn::BitCast(U(), product), hn::Set(U(), 0x8000U)));
    const VU word = hn::IfThenElse(hn::RebindMask(U(), hn::IsNaN(product)), hn::Set(U(), std::uint32_t{kNan}), away);
    hn::StoreU(hn::TruncateTo(Words(), word), Words(), words + i);
  }
  for (; i < n; ++i) words[i] = rounded_away(e4m3(codes[i]) * scale);
}

// As e2m1() and e8m0() say; `code` has four bits.
HWY_INLINE VU mxfp4_words(VU code, VU scale) {
  const VU magnitude = hn::And(code, hn::Set(U(), 7U)), sign = hn::ShiftLeft<28>(hn::Xor(code, magnitude));
  const VU bits = hn::Add(hn::ShiftLeft<22>(magnitude), hn::Set(U(), 126U << 23));
  const VF small = hn::Sub(hn::BitCast(F(), hn::Add(bits, hn::Set(U(), 1U << 23))), hn::Set(F(), 1.0F));
  const auto below_one = hn::Lt(hn::BitCast(I(), magnitude), hn::Set(I(), 2));
  const VU value = hn::IfThenElse(hn::RebindMask(U(), below_one), hn::BitCast(U(), small), bits);
  const VU power = hn::IfThenElse(hn::Eq(scale, hn::Zero(U())), hn::Set(U(), 1U << 22), hn::ShiftLeft<23>(scale));
  return rounded_words(hn::Mul(hn::BitCast(F(), hn::Or(value, sign)), hn::BitCast(F(), power)));
}

void decode_mxfp4(const std::uint8_t* codes, const std::uint8_t* scales, std::size_t n, std::uint16_t* words) {
  const std::size_t lanes = hn::Lanes(F());
  std::size_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    const VU pair = hn::PromoteTo(U(), hn::LoadU(Bytes(), codes + i / 2));
    hn::Vec<Bytes> even, odd;
    hn::LoadInterleaved2(Bytes(), scales + i, even, odd);
    const VU first = mxfp4_words(hn::And(pair, hn::Set(U(), 15U)), hn::PromoteTo(U(), even));
    const VU second = mxfp4_words(hn::ShiftRight<4>(pair), hn::PromoteTo(U(), odd));
    hn::StoreInterleaved2(hn::TruncateTo(Words(), first), hn::TruncateTo(Words(), second), Words(), words + i);
  }
  for (; i < n; i += 2) {
    words[i] = rounded(e2m1(codes[i / 2]) * e8m0(scales[i]));
    words[i + 1] = rounded(e2m1(codes[i / 2] >> 4) * e8m0(scales[i + 1]));
  }
}

// A block has sixteen words: they are rounded once, then looked up byte by byte.
void decode_nf4(const std::uint8_t* codes, const float* absmax, std::size_t blocks, std::uint16_t* words) {
  const hn::Full128<std::uint8_t> bytes;
  const hn::Full128<std::uint16_t> halves;
  alignas(16) std::uint8_t low[kMostBlocks * 16], high[kMostBlocks * 16];
  for (std::size_t block = 0; block < blocks; ++block)
    for (std::size_t i = 0; i < 16; i += hn::Lanes(F())) {
      const VU word = rounded_words(hn::Mul(hn::LoadU(F(), kNf4.at + i), hn::Set(F(), absmax[block])));
      hn::StoreU(hn::U8FromU32(hn::And(word, hn::Set(U(), 0xffU))), Bytes(), low + block * 16 + i);
      hn::StoreU(hn::U8FromU32(hn::ShiftRight<8>(word)), Bytes(), high + block * 16 + i);
    }
  for (std::size_t block = 0; block < blocks; ++block) {
    const auto lows = hn::Load(bytes, low + block * 16), highs = hn::Load(bytes, high + block * 16);
    for (std::size_t half = 0; half < 2; ++half, codes += 16, words += 32) {
      const auto pair = hn::LoadU(bytes, codes);
      const auto first = hn::And(hn::BitCast(bytes, hn::ShiftRight<4>(hn::BitCast(halves, pair))), hn::Set(bytes, 15));
      const auto second = hn::And(pair, hn::Set(bytes, 15));
      const auto first_low = hn::TableLookupBytes(lows, first), first_high = hn::TableLookupBytes(highs, first);
      const auto second_low = hn::TableLookupBytes(lows, second), second_high = hn::TableLookupBytes(highs, second);
      const auto a = hn::BitCast(halves, hn::InterleaveLower(bytes, first_low, first_high));
      const auto b = hn::BitCast(halves, hn::InterleaveLower(bytes, second_low, second_high));
      const auto c = hn::BitCast(halves, hn::InterleaveUpper(bytes, first_low, first_high));
      const auto d = hn::BitCast(halves, hn::InterleaveUpper(bytes, second_low, second_high));
      hn::StoreU(hn::InterleaveLower(halves, a, b), halves, words);
      hn::StoreU(hn::InterleaveUpper(halves, a, b), halves, words + 8);
      hn::StoreU(hn::InterleaveLower(halves, c, d), halves, words + 16);
      hn::StoreU(hn::InterleaveUpper(halves, c, d), halves, words + 24);
    }
  }
}

#endif

}  // namespace tierflow::weights::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tierflow::weights {
namespace {
HWY_EXPORT(encode_nf4);
HWY_EXPORT(encode_int8);
HWY_EXPORT(decode_nf4);
HWY_EXPORT(decode_int8);
HWY_EXPORT(decode_e4m3);
HWY_EXPORT(decode_mxfp4);
}  // namespace

bool encode_nf4(const float* values, std::size_t blocks, std::uint8_t* codes, float* absmax) {
  return HWY_DYNAMIC_DISPATCH(encode_nf4)(values, blocks, codes, absmax);
}
bool encode_int8(const float* values, std::size_t blocks, std::uint8_t* codes, float* absmax) {
  return HWY_DYNAMIC_DISPATCH(encode_int8)(values, blocks, codes, absmax);
}
void decode_nf4(const std::uint8_t* codes, const float* absmax, std::size_t blocks, std::uint16_t* words) {
  HWY_DYNAMIC_DISPATCH(decode_nf4)(codes, absmax, blocks, words);
}
void decode_int8(const std::uint8_t* codes, float scale, std::size_t n, std::uint16_t* words) {
  HWY_DYNAMIC_DISPATCH(decode_int8)(codes, scale, n, words);
}
void decode_e4m3(const std::uint8_t* codes, float scale, std::size_t n, std::uint16_t* words) {
  HWY_DYNAMIC_DISPATCH(decode_e4m3)(codes, scale, n, words);
}
void decode_mxfp4(const std::uint8_t* codes, const std::uint8_t* scales, std::size_t n, std::uint16_t* words) {
  HWY_DYNAMIC_DISPATCH(decode_mxfp4)(codes, scales, n, words);
}

}  // namespace tierflow::weights
#endif  // HWY_ONCE

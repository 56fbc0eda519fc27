// The codec of block_codec.h on vectors, once for each instruction set (no include guard by intent: see
// foreach_target.h of Highway). A "unit" is two vectors of floats of one vector of 16-bit words: of each 16 bytes of
// words, a holds the lower four elements and b the upper. That is what interleaving words makes and packing undoes, one
// instruction each. Arithmetic is elementwise and does not care.
#if defined(TIERFLOW_OPTIM_CODEC_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TIERFLOW_OPTIM_CODEC_INL_H_
#undef TIERFLOW_OPTIM_CODEC_INL_H_
#else
#define TIERFLOW_OPTIM_CODEC_INL_H_
#endif

#include <hwy/highway.h>

#include <bit>

#include "optim/block_codec.h"

HWY_BEFORE_NAMESPACE();
namespace tierflow::optim::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F = hn::ScalableTag<float>;
using I = hn::RebindToSigned<F>;
using U = hn::RebindToUnsigned<F>;
using Words = hn::Repartition<std::uint16_t, F>;
using SignedWords = hn::Repartition<std::int16_t, F>;
using Bytes = hn::Half<hn::Repartition<std::uint8_t, F>>;  // as many as Words
using VF = hn::Vec<F>;
using VI = hn::Vec<I>;
using VU = hn::Vec<U>;
using VW = hn::Vec<Words>;

inline constexpr std::size_t kLanes = HWY_MAX_BYTES / 4;
inline constexpr std::size_t kUnit = 2 * kLanes;  // elements

struct Pair {
  VF a, b;
};

HWY_INLINE VU bits(VF x) {
  return hn::BitCast(U(), x);
}
HWY_INLINE VF floats(VU x) {
  return hn::BitCast(F(), x);
}

// ---- what instruction sets have by different names

// 16 floats looked up by the low 4 bits of an index. With 8 lanes only the low 3 bits count: such callers treat entry 8
// apart.
#if HWY_TARGET <= HWY_AVX3
template <int part>
struct HalfWordOrder {
  std::uint16_t at[32] = {};
  constexpr HalfWordOrder() {
    for (int i = 0; i < 32; ++i) at[i] = static_cast<std::uint16_t>((i & 4) * 8 + (i / 8 * 4 + i % 4) * 2 + part);
  }
};
HWY_INLINE VF lookup(VF table, VU index) {
  return VF{_mm512_permutexvar_ps(index.raw, table.raw)};
}
HWY_INLINE VF load_table(const float* table) {
  return hn::Load(F(), table);
}
using Table = VF;
inline constexpr bool kWideTable = true;
HWY_INLINE VI truncated(VF x) {
  return VI{_mm512_cvttps_epi32(x.raw)};
}
// Codes of two vectors of words, in memory order; below 0 becomes 0.
HWY_INLINE void store_codes(VW first, VW second, std::uint8_t* codes) {
  const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  _mm512_storeu_si512(codes, _mm512_permutexvar_epi64(order, _mm512_packus_epi16(first.raw, second.raw)));
}
// The words in the lower (part 0) or upper (part 1) halves of a unit's lanes.
template <int part>
HWY_INLINE VW half_words(VU a, VU b) {
  alignas(64) static constexpr HalfWordOrder<part> kOrder{};
  return VW{_mm512_permutex2var_epi16(a.raw, _mm512_load_si512(kOrder.at), b.raw)};
}
// Numbers below 2^16 in the lanes of a unit to words.
HWY_INLINE VW packed_words(VU a, VU b) {
  return half_words<0>(a, b);
}
// 32 entries, by the low 5 bits.
HWY_INLINE VF lookup(const float* table, VU index) {
  return VF{_mm512_permutex2var_ps(_mm512_load_ps(table), index.raw, _mm512_load_ps(table + 16))};
}
HWY_INLINE VU lookup(const std::uint32_t* table, VU index) {
  return VU{_mm512_permutex2var_epi32(_mm512_load_si512(table), index.raw, _mm512_load_si512(table + 16))};
}
// The operand of smaller, of larger magnitude, with the sign of the first.
HWY_INLINE VF smaller(VF x, VF y) {
  return VF{_mm512_range_ps(x.raw, y.raw, 2)};
}
HWY_INLINE VF larger(VF x, VF y) {
  return VF{_mm512_range_ps(x.raw, y.raw, 3)};
}
HWY_INLINE Table scaled_table(const float* table, float factor, float*) {
  return hn::Mul(hn::Load(F(), table), hn::Set(F(), factor));
}
#elif HWY_TARGET == HWY_AVX2
HWY_INLINE VF lookup(VF table, VU index) {
  return VF{_mm256_permutevar8x32_ps(table.raw, index.raw)};
}
HWY_INLINE VF load_table(const float* table) {
  return hn::Load(F(), table);
}
using Table = VF;
inline constexpr bool kWideTable = false;
HWY_INLINE VF smaller(VF x, VF bound) {
  return hn::Max(hn::Min(x, bound), hn::Neg(bound));
}
HWY_INLINE VI with_sign(VI rank, VF value) {
  return VI{_mm256_sign_epi32(rank.raw, _mm256_castps_si256(value.raw))};
}
HWY_INLINE VI truncated(VF x) {
  return VI{_mm256_cvttps_epi32(x.raw)};
}
HWY_INLINE void store_codes(VW first, VW second, std::uint8_t* codes) {
  const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(first.raw, second.raw), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), bytes);
}
HWY_INLINE VW packed_words(VU a, VU b) {
  return VW{_mm256_packus_epi32(a.raw, b.raw)};
}
template <int part>
HWY_INLINE VW half_words(VU a, VU b) {
  if constexpr (part == 1) return packed_words(hn::ShiftRight<16>(a), hn::ShiftRight<16>(b));
  const VU low = hn::Set(U(), 0x0000ffffU);
  return packed_words(hn::And(a, low), hn::And(b, low));
}
HWY_INLINE VU high_product(VU a, VU b) {
  return VU{_mm256_mulhi_epu16(a.raw, b.raw)};
}
HWY_INLINE VU next_where_ge(VU at, VF x, VF edge) {
  return hn::Sub(at, bits(hn::VecFromMask(F(), hn::Ge(x, edge))));
}
HWY_INLINE Table scaled_table(const float* table, float factor, float*) {
  return hn::Mul(hn::Load(F(), table), hn::Set(F(), factor));
}
#else
using Table = const float*;
inline constexpr bool kWideTable = true;
HWY_INLINE VF lookup(const float* table, VU index) {
  return hn::GatherIndex(F(), table, hn::BitCast(I(), hn::And(index, hn::Set(U(), 15))));
}
HWY_INLINE Table load_table(const float* table) {
  return table;
}
HWY_INLINE VF smaller(VF x, VF bound) {
  return hn::Max(hn::Min(x, bound), hn::Neg(bound));
}
HWY_INLINE VI with_sign(VI rank, VF value) {
  const VI minus = hn::BroadcastSignBit(hn::BitCast(I(), value));
  return hn::Sub(hn::Xor(rank, minus), minus);
}
HWY_INLINE VI truncated(VF x) {
  return hn::ConvertTo(I(), x);
}
HWY_INLINE void store_codes(VW first, VW second, std::uint8_t* codes) {
  hn::StoreU(hn::DemoteTo(Bytes(), hn::BitCast(SignedWords(), first)), Bytes(), codes);
  hn::StoreU(hn::DemoteTo(Bytes(), hn::BitCast(SignedWords(), second)), Bytes(), codes + kUnit);
}
template <int part>
HWY_INLINE VW half_words(VU a, VU b) {
  const VW x = hn::BitCast(Words(), a), y = hn::BitCast(Words(), b);
  return part == 1 ? hn::ConcatOdd(Words(), y, x) : hn::ConcatEven(Words(), y, x);
}
HWY_INLINE VW packed_words(VU a, VU b) {
  return half_words<0>(a, b);
}
HWY_INLINE VU high_product(VU a, VU b) {
  return hn::ShiftRight<16>(hn::Mul(a, b));
}
HWY_INLINE VU next_where_ge(VU at, VF x, VF edge) {
  return hn::Sub(at, bits(hn::VecFromMask(F(), hn::Ge(x, edge))));
}
HWY_INLINE Table scaled_table(const float* table, float factor, float* room) {
  for (int i = 0; i < 16; ++i) room[i] = table[i] * factor;
  return room;
}
#endif

// ---- words

// Lanes of a unit from the words of their upper and lower halves.
HWY_INLINE Pair unit_of(VW upper, VW lower) {
  return {hn::BitCast(F(), hn::InterleaveLower(Words(), lower, upper)),
          hn::BitCast(F(), hn::InterleaveUpper(Words(), lower, upper))};
}

// Words to the upper halves of the lanes: bf16 widened.
HWY_INLINE Pair widened_pair(VW words) {
  return unit_of(words, hn::Zero(Words()));
}

HWY_INLINE Pair joined_pair(VW hi, VW lo) {
  return unit_of(hn::Sub(hi, hn::ShiftRight<15>(lo)), lo);
}

HWY_INLINE VW hi_words(Pair p) {
  const VU half = hn::Set(U(), 0x8000U);
  return half_words<1>(hn::Add(bits(p.a), half), hn::Add(bits(p.b), half));
}

HWY_INLINE VW lo_words(Pair p) {
  return half_words<0>(bits(p.a), bits(p.b));
}

HWY_INLINE VU narrowed_word(VF x) {
  const VI magnitude = hn::BitCast(I(), hn::And(bits(x), hn::Set(U(), 0x7fffffffU)));
  const auto nan = hn::RebindMask(U(), hn::Gt(magnitude, hn::Set(I(), 0x7f800000)));
  const VU rounded = hn::ShiftRight<16>(hn::Add(bits(x), hn::Set(U(), 0x8000U)));
  return hn::IfThenElse(nan, hn::ShiftRight<16>(hn::Or(bits(x), hn::Set(U(), 0x400000U))), rounded);
}

// `element`: the low 32 bits of each lane's index.
HWY_INLINE VU stochastically_narrowed_word(VF x, RoundingKey key, VU element) {
  VU r = hn::Xor(element, hn::Set(U(), key.before));
  r = hn::Xor(hn::Mul(hn::Xor(r, hn::ShiftRight<16>(r)), hn::Set(U(), 0x7feb352dU)), hn::Set(U(), key.between));
  r = hn::ShiftRight<16>(hn::Mul(hn::Xor(r, hn::ShiftRight<15>(r)), hn::Set(U(), 0x846ca68bU)));
  const VU exponent = hn::Set(U(), 0x7f800000U);
  const auto special = hn::Eq(hn::And(bits(x), exponent), exponent);
  return hn::IfThenElse(special, narrowed_word(x), hn::ShiftRight<16>(hn::Add(bits(x), r)));
}

// ---- the dynamic code

// Decoding: the exponent of a mark, modulo the table, finds its decade's factor times absmax. In a table of 8 zero and
// one share an entry, and zeros are cleared.
template <bool Signed>
struct Decoder {
  Table factors;
  alignas(64) float room[16];

  HWY_INLINE explicit Decoder(float absmax) {
    alignas(64) static constexpr float kSigned[16] = {1e-7F, 1e-6F, 1e-5F, 1e-4F, 1e-3F, 1e-2F, 1e-1F, 1};
    alignas(64) static constexpr float kUnsigned[16] = {
        kWideTable ? 0.0F : 1.0F, 1e-7F, 1e-6F, 1e-5F, 1e-4F, 1e-3F, 1e-2F, 1e-1F, 1};
    factors = scaled_table(Signed ? kSigned : kUnsigned, absmax, room);
  }

  // `mark`: a mark in the lower (unsigned) or the upper half (signed, with its sign) of each lane. 2^16 more or less in
  // the mark is 16 more or less in the exponent, which the lookup does not see.
  HWY_INLINE VF value(VU mark) const {
    const VF q = hn::ConvertTo(F(), hn::BitCast(I(), mark));
    const VF g = floats(hn::OrAnd(hn::Set(U(), 0x3f800000U), bits(q), hn::Set(U(), 0x7fffffU)));
    const VF place = hn::MulAdd(hn::Set(F(), 9.0F), g, hn::Set(F(), -8.0F));
    VF value = hn::Mul(place, lookup(factors, hn::ShiftRight<23>(bits(q))));
    if constexpr (!kWideTable) value = hn::IfThenZeroElse(hn::Eq(q, hn::Set(F(), Signed ? 65536.0F : 3.0F)), value);
    return Signed ? floats(hn::OrAnd(bits(value), hn::Set(U(), 0x80000000U), bits(q))) : value;
  }

  HWY_INLINE Pair load(const std::uint8_t* codes) const {
    const VW c = hn::PromoteTo(Words(), hn::LoadU(Bytes(), codes));
    const VW twice = hn::Add(c, c);
    if constexpr (Signed) {
      const auto t = hn::BitCast(SignedWords(), hn::Sub(twice, hn::Set(Words(), 2 * kZeroCodeSigned)));
      const auto away = hn::Add(t, hn::Or(hn::ShiftRight<15>(t), hn::Set(SignedWords(), 1)));
      const Pair mark = unit_of(hn::BitCast(Words(), hn::Min(away, hn::Set(SignedWords(), 256))), hn::Zero(Words()));
      return {value(bits(mark.a)), value(bits(mark.b))};
    } else {
      const Pair mark = unit_of(hn::Zero(Words()), hn::Min(hn::Add(twice, hn::Set(Words(), 3)), hn::Set(Words(), 512)));
      return {value(bits(mark.a)), value(bits(mark.b))};
    }
  }
};

// Encoding: the class of x is 0 for zero, 1 + i for decade i, 8 for one. Slopes and offsets are looked up by class; the
// last rank of a decade is (9/4 offset) and a little, which leaves the classes of zero and one alone.
template <bool Signed>
struct EncoderRule {
  using C = Cells<Signed>;
  static constexpr float kTop = C::kTop;
  static constexpr float kBeyond = Signed ? -0.5F : 0.75F;  // truncated, 9/4 offset + kBeyond is the last rank
  static constexpr float slope(int at) { return at >= 1 && at <= 7 ? C::slope(at - 1) : 0.0F; }
  static constexpr float offset(int at) { return at == 8 ? kTop : at >= 1 && at <= 7 ? C::offset(at - 1) : 0.0F; }
};

#if HWY_TARGET <= HWY_AVX3
// No binade holds two edges, and no binade with an edge follows another. So x's biased exponent, plus one where x is on
// or above its binade's edge, names the class; adding `steps` to the bits carries into the exponent exactly there. Five
// bits of the exponent tell the binades from 2^-23 on apart; smaller x are zeros as well.
template <bool Signed>
struct EncoderTables {
  std::uint32_t steps[32] = {};
  float slopes[32] = {}, offsets[32] = {};

  constexpr EncoderTables() {
    std::uint32_t edges[8] = {};
    for (int j = 0; j < 8; ++j) edges[j] = std::bit_cast<std::uint32_t>(Cells<Signed>::edge(j));
    for (std::uint32_t exponent = 104; exponent < 128; ++exponent) {
      int at = 0;
      for (std::uint32_t edge : edges) {
        if (edge >> 23 == exponent) steps[exponent % 32] = 0x800000U - (edge & 0x7fffffU);
        at += edge >> 23 < exponent ? 1 : 0;
      }
      slopes[exponent % 32] = EncoderRule<Signed>::slope(at);
      offsets[exponent % 32] = EncoderRule<Signed>::offset(at);
    }
  }
};

template <bool Signed>
struct Encoder {
  alignas(64) static constexpr EncoderTables<Signed> kTables{};

  HWY_INLINE Encoder() {}

  // Rank with the sign of the value.
  HWY_INLINE VI rank(VF value, VF inverse) const {
    const VF product = hn::Mul(value, inverse), tiny = hn::Set(F(), 0x1p-23F);
    const VF x = Signed ? larger(product, tiny) : hn::Max(product, tiny);
    const VU at = hn::ShiftRight<23>(hn::Add(bits(x), lookup(kTables.steps, hn::ShiftRight<23>(bits(x)))));
    const VF offset = lookup(kTables.offsets, at), slope = lookup(kTables.slopes, at);
    const VF last = hn::MulAdd(offset, hn::Set(F(), 2.25F), hn::Set(F(), EncoderRule<Signed>::kBeyond));
    if constexpr (!Signed) return truncated(hn::Min(hn::MulAdd(x, slope, offset), last));
    const VF signed_offset = floats(hn::OrAnd(bits(offset), hn::Set(U(), 0x80000000U), bits(x)));
    return truncated(smaller(hn::MulAdd(x, slope, signed_offset), last));
  }
#else
// From the upper half of x's bits a product estimates the class from below by at most one (checked for all x in the
// tests); one comparison settles it. In a table of 8 the class of one is at 0, and zeros are cleared.
template <bool Signed>
struct EncoderTables {
  using C = Cells<Signed>;
  using R = EncoderRule<Signed>;
  alignas(64) static constexpr float edges[16] = {C::edge(0), C::edge(1), C::edge(2), C::edge(3),
                                                  C::edge(4), C::edge(5), C::edge(6), C::edge(7)};
  alignas(64) static constexpr float slopes[16] = {
      0, R::slope(1), R::slope(2), R::slope(3), R::slope(4), R::slope(5), R::slope(6), R::slope(7), 0};
  alignas(64) static constexpr float offsets[16] = {kWideTable ? 0.0F : R::kTop,
                                                    R::offset(1),
                                                    R::offset(2),
                                                    R::offset(3),
                                                    R::offset(4),
                                                    R::offset(5),
                                                    R::offset(6),
                                                    R::offset(7),
                                                    R::kTop};
};

template <bool Signed>
struct Encoder {
  using T = EncoderTables<Signed>;
  Table edges, slopes, offsets;

  HWY_INLINE Encoder() : edges(load_table(T::edges)), slopes(load_table(T::slopes)), offsets(load_table(T::offsets)) {}

  // Rank with the sign of the value.
  HWY_INLINE VI rank(VF value, VF inverse) const {
    VF x = hn::Mul(Signed ? hn::Abs(value) : value, inverse);
    if constexpr (kWideTable) x = hn::Max(x, hn::Set(F(), 0x1p-23F));
    const VU estimate = high_product(hn::ShiftRight<16>(bits(x)), hn::Set(U(), 160));
    const VU at = next_where_ge(estimate, x, lookup(edges, estimate));
    const VF offset = lookup(offsets, at);
    VF r = hn::MulAdd(x, lookup(slopes, at), offset);
    r = hn::Min(r, hn::MulAdd(offset, hn::Set(F(), 2.25F), hn::Set(F(), EncoderRule<Signed>::kBeyond)));
    if constexpr (!kWideTable) r = hn::IfThenElseZero(hn::Ge(x, hn::Set(F(), T::edges[0])), r);
    return Signed ? with_sign(truncated(r), value) : truncated(r);
  }
#endif

  HWY_INLINE VW words(Pair p, VF inverse) const {
    const VW w = hn::BitCast(Words(), hn::ReorderDemote2To(SignedWords(), rank(p.a, inverse), rank(p.b, inverse)));
    return Signed ? hn::Add(w, hn::Set(Words(), kZeroCodeSigned)) : w;
  }

  // Two units.
  HWY_INLINE void store(Pair first, Pair second, VF inverse, std::uint8_t* codes) const {
    store_codes(words(first, inverse), words(second, inverse), codes);
  }
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace tierflow::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle

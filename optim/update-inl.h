// The update on vectors, once for each instruction set. Same arithmetic, in the same order, as step.h and scalar.cpp.
#if defined(TIERFLOW_OPTIM_UPDATE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TIERFLOW_OPTIM_UPDATE_INL_H_
#undef TIERFLOW_OPTIM_UPDATE_INL_H_
#else
#define TIERFLOW_OPTIM_UPDATE_INL_H_
#endif

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <algorithm>

#include "optim/kernels.h"

#if HWY_TARGET != HWY_SSE2 && HWY_TARGET != HWY_EMU128 && HWY_TARGET != HWY_SCALAR
#include "optim/codec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tierflow::optim::HWY_NAMESPACE {

inline constexpr std::size_t kUnits = kBlock / kUnit;
inline constexpr std::size_t kAhead = 4096;  // bytes of prefetch; beyond the end of a stream it is harmless

template <Rule R>
struct Stepper {
  VF scale, beta1, rest1, beta2, rest2, root_correction2, eps, bound, minus_step_size, decay, l2;

  HWY_INLINE explicit Stepper(const Coefficients& k)
      : scale(hn::Set(F(), k.scale)),
        beta1(hn::Set(F(), k.beta1)),
        rest1(hn::Set(F(), k.rest1)),
        beta2(hn::Set(F(), k.beta2)),
        rest2(hn::Set(F(), k.rest2)),
        root_correction2(hn::Set(F(), k.root_correction2)),
        eps(hn::Set(F(), k.eps)),
        bound(hn::Set(F(), k.bound)),
        minus_step_size(hn::Set(F(), -k.step_size)),
        decay(hn::Set(F(), k.decay)),
        l2(hn::Set(F(), k.l2)) {}

  HWY_INLINE void step(VF g, VF& p, VF& m, VF& v) const {
    g = hn::Mul(g, scale);
    if constexpr (R == Rule::adam || R == Rule::sgd) g = hn::MulAdd(l2, p, g);
    if constexpr (R == Rule::adamw || R == Rule::adam) {
      m = hn::MulAdd(beta1, m, hn::Mul(rest1, g));
      v = hn::MulAdd(beta2, v, hn::Mul(hn::Mul(rest2, g), g));
      const VF u = smaller(hn::Div(m, hn::MulAdd(hn::Sqrt(v), root_correction2, eps)), bound);
      p = hn::MulAdd(minus_step_size, u, R == Rule::adamw ? hn::Mul(p, decay) : p);
    } else if constexpr (R == Rule::lion) {
      const VF direction = hn::MulAdd(beta1, m, hn::Mul(rest1, g));
      const VF zero = hn::Zero(F()), one = hn::Set(F(), 1.0F), minus_one = hn::Set(F(), -1.0F);
      const VF sign = hn::IfThenElse(hn::Gt(direction, zero), one, hn::IfThenElseZero(hn::Lt(direction, zero), minus_one));
      m = hn::MulAdd(beta2, m, hn::Mul(rest2, g));
      p = hn::MulAdd(minus_step_size, sign, hn::Mul(p, decay));
    } else {
      m = hn::MulAdd(beta1, m, g);
      p = hn::MulAdd(minus_step_size, m, p);
    }
  }
};

// Floats in memory to a unit and back.
HWY_INLINE Pair load_floats(const float* at) {
  const VF x = hn::LoadU(F(), at), y = hn::LoadU(F(), at + kLanes);
  return {hn::ConcatEven(F(), y, x), hn::ConcatOdd(F(), y, x)};
}

HWY_INLINE void store_floats(Pair p, float* at) {
#if HWY_TARGET <= HWY_AVX3
  const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  hn::StoreU(VF{_mm512_permutex2var_ps(p.a.raw, first, p.b.raw)}, F(), at);
  hn::StoreU(VF{_mm512_permutex2var_ps(p.a.raw, second, p.b.raw)}, F(), at + kLanes);
#else
  const VF low = hn::InterleaveLower(F(), p.a, p.b), high = hn::InterleaveUpper(F(), p.a, p.b);
#if HWY_TARGET == HWY_AVX2
  hn::StoreU(hn::ConcatLowerLower(F(), high, low), F(), at);
  hn::StoreU(hn::ConcatUpperUpper(F(), high, low), F(), at + kLanes);
#else
  hn::StoreU(low, F(), at);
  hn::StoreU(high, F(), at + kLanes);
#endif
#endif
}

// One moment of one block: decoded unit by unit; for block8, kept as floats until the block's absmax is known and encoded beside the
// next block's arithmetic.
template <MomentFormat M, bool Signed>
struct MomentBlocks {
  const Moment from, to;

  template <class T>
  static HWY_INLINE void fetch(const void* values, std::size_t element) {
    const auto address = reinterpret_cast<std::uintptr_t>(static_cast<const T*>(values) + element) + kAhead;
    for (std::size_t line = 0; line < kUnit * sizeof(T); line += 64) hwy::Prefetch(reinterpret_cast<const char*>(address) + line);
  }

  HWY_INLINE Pair load(std::size_t element) const {
    if constexpr (M == MomentFormat::f32) {
      fetch<float>(from.values, element);
      return load_floats(static_cast<const float*>(from.values) + element);
    } else {
      fetch<std::uint16_t>(from.values, element);
      return widened_pair(hn::Load(Words(), static_cast<const std::uint16_t*>(from.values) + element));
    }
  }

  HWY_INLINE void store(Pair p, std::size_t element) const {
    if constexpr (M == MomentFormat::f32)
      store_floats(p, static_cast<float*>(to.values) + element);
    else
      hn::Store(lower_words(narrowed_word(p.a), narrowed_word(p.b)), Words(), static_cast<std::uint16_t*>(to.values) + element);
  }
};

// Floats of a block whose codes are not written yet.
template <bool Signed>
struct Pending {
  alignas(64) float values[kBlock];
  float inverse = 0;

  HWY_INLINE void put(std::size_t unit, Pair p) {
    hn::Store(p.a, F(), values + unit * kUnit);
    hn::Store(p.b, F(), values + unit * kUnit + kLanes);
  }
  HWY_INLINE Pair get(std::size_t unit) const {
    return {hn::Load(F(), values + unit * kUnit), hn::Load(F(), values + unit * kUnit + kLanes)};
  }
  // Units `unit` and the next.
  HWY_INLINE void encode(const Encoder<Signed>& encoder, std::size_t unit, std::uint8_t* codes) const {
    encoder.store(get(unit), get(unit + 1), hn::Set(F(), inverse), codes + unit * kUnit);
  }
};

// The largest magnitude so far, compared as integers, so that a NaN is larger than all else.
struct Largest {
  VI a, b;

  HWY_INLINE Largest() : a(hn::Zero(I())), b(hn::Zero(I())) {}
  template <bool Signed>
  HWY_INLINE void take(Pair p) {
    a = hn::Max(a, hn::BitCast(I(), Signed ? hn::Abs(p.a) : p.a));
    b = hn::Max(b, hn::BitCast(I(), Signed ? hn::Abs(p.b) : p.b));
  }
  HWY_INLINE float value() const { return float_of(static_cast<std::uint32_t>(hn::GetLane(hn::MaxOfLanes(I(), hn::Max(a, b))))); }
};

HWY_INLINE bool block_within(const std::uint16_t* gradient, std::uint16_t largest_allowed) {
  VW largest = hn::Zero(Words());
  const VW magnitude = hn::Set(Words(), 0x7fff);
  for (std::size_t i = 0; i < kBlock; i += kUnit)
    largest = hn::Max(largest, hn::And(hn::Load(Words(), gradient + i), magnitude));
  return hn::AllFalse(SignedWords(), hn::Gt(hn::BitCast(SignedWords(), largest),
                                            hn::Set(SignedWords(), static_cast<std::int16_t>(largest_allowed))));
}

// The largest gradient magnitude, as bits, that is `within` the scale; 0 where none is: then even zeros count as not finite.
inline int largest_allowed(float scale) {
  int low = -1, high = 0x7f80;  // low is allowed, high is not
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (within(static_cast<std::uint32_t>(middle), scale) ? low : high) = middle;
  }
  return low;
}

template <Rule R, MomentFormat M, MasterFormat P>
class BlockUpdate {
 public:
  HWY_INLINE explicit BlockUpdate(const Update& u) : u_(u), stepper_(u.k), m_{u.from.m, u.to.m}, v_{u.from.v, u.to.v} {}

  // Whole blocks [begin, end).
  std::size_t run(std::size_t begin, std::size_t end) {
    const int allowed = largest_allowed(u_.k.scale);
    std::size_t skipped = 0;
    bool pending = false;
    for (std::size_t block = begin; block < end; ++block) {
      if (allowed < 0 || !block_within(u_.gradient + block * kBlock, static_cast<std::uint16_t>(allowed))) {
        if (pending) flush(block - 1);
        pending = false;
        copy_block(u_, block);
        skipped += kBlock;
        continue;
      }
      if (pending)
        compute<true>(block);
      else
        compute<false>(block);
      pending = k8;
    }
    if (pending) flush(end - 1);
    return skipped;
  }

 private:
  static constexpr bool k8 = M == MomentFormat::block8;
  static constexpr bool kV = R == Rule::adamw || R == Rule::adam;

  static HWY_INLINE const std::uint8_t* codes(const Moment& m, std::size_t block) {
    return static_cast<const std::uint8_t*>(m.values) + block * kBlock;
  }
  static HWY_INLINE std::uint8_t* mutable_codes(const Moment& m, std::size_t block) {
    return static_cast<std::uint8_t*>(m.values) + block * kBlock;
  }

  HWY_INLINE void flush(std::size_t block) {
    for (std::size_t unit = 0; unit < kUnits; unit += 2) encode(block, unit);
  }

  HWY_INLINE void encode(std::size_t block, std::size_t unit) {
    pending_m_[block % 2].encode(encoder_m_, unit, mutable_codes(u_.to.m, block));
    if constexpr (kV) pending_v_[block % 2].encode(encoder_v_, unit, mutable_codes(u_.to.v, block));
  }

  HWY_INLINE Pair load_master(std::size_t element) const {
    const VW hi = hn::Load(Words(), u_.from.hi + element);
    if constexpr (P == MasterFormat::bf16_sr) return widened_pair(hi);
    return joined_pair(hi, hn::Load(Words(), u_.from.lo + element));
  }

  HWY_INLINE void store_master(Pair p, std::size_t element, RoundingKey key) const {
    if constexpr (P == MasterFormat::split) {
      hn::Store(hi_words(p), Words(), u_.to.hi + element);
      hn::Store(lo_words(p), Words(), u_.to.lo + element);
    } else {
      const VU iota = hn::Iota(U(), 0), even = hn::Add(iota, iota), one = hn::Set(U(), 1);
      const VU index = hn::Add(hn::Set(U(), static_cast<std::uint32_t>(u_.first_element + element)), even);
      const VU a = stochastically_narrowed_word(p.a, key, index);
      const VU b = stochastically_narrowed_word(p.b, key, hn::Add(index, one));
      hn::Store(lower_words(a, b), Words(), u_.to.hi + element);
    }
  }

  static HWY_INLINE void fetch(const void* at) {
    hwy::Prefetch(reinterpret_cast<const char*>(reinterpret_cast<std::uintptr_t>(at) + kAhead));
  }

  // What a block's units share.
  struct Running {
    const Decoder<true> decode_m;
    const Decoder<false> decode_v;
    RoundingKey key;
    Largest largest_m, largest_v;

    HWY_INLINE Running(float m, float v) : decode_m(m), decode_v(v) {}
  };

  HWY_INLINE void update_unit(std::size_t block, std::size_t unit, Running& r) {
    const std::size_t element = block * kBlock + unit * kUnit;
    fetch(u_.gradient + element);
    fetch(u_.from.hi + element);
    if constexpr (P == MasterFormat::split) fetch(u_.from.lo + element);
    const Pair g = widened_pair(hn::Load(Words(), u_.gradient + element));
    Pair p = load_master(element), m, v{hn::Zero(F()), hn::Zero(F())};
    if constexpr (k8) {
      m = r.decode_m.load(codes(u_.from.m, block) + unit * kUnit);
      if constexpr (kV) v = r.decode_v.load(codes(u_.from.v, block) + unit * kUnit);
    } else {
      m = m_.load(element);
      if constexpr (kV) v = v_.load(element);
    }
    stepper_.step(g.a, p.a, m.a, v.a);
    stepper_.step(g.b, p.b, m.b, v.b);
    store_master(p, element, r.key);
    if constexpr (k8) {
      pending_m_[block % 2].put(unit, m);
      r.largest_m.template take<true>(m);
      if constexpr (kV) {
        pending_v_[block % 2].put(unit, v);
        r.largest_v.template take<false>(v);
      }
    } else {
      m_.store(m, element);
      if constexpr (kV) v_.store(v, element);
    }
  }

  // Updates one block and, with `Encode`, writes the codes of the block before it.
  template <bool Encode>
  HWY_INLINE void compute(std::size_t block) {
    Running r(k8 ? u_.from.m.absmax[block] : 0.0F, k8 && kV ? u_.from.v.absmax[block] : 0.0F);
    if constexpr (P == MasterFormat::bf16_sr) r.key = rounding_key(u_.key, u_.step, u_.first_element + block * kBlock);
    for (std::size_t unit = 0; unit < kUnits; unit += 2) {
      if constexpr (k8) {
        fetch(codes(u_.from.m, block) + unit * kUnit);
        if constexpr (kV) fetch(codes(u_.from.v, block) + unit * kUnit);
        if constexpr (Encode) encode(block - 1, unit);
      }
      update_unit(block, unit, r);
      update_unit(block, unit + 1, r);
    }
    if constexpr (k8) {
      finish(pending_m_[block % 2], u_.to.m, block, r.largest_m.value());
      if constexpr (kV) finish(pending_v_[block % 2], u_.to.v, block, r.largest_v.value());
    }
  }

  template <class P2>
  static HWY_INLINE void finish(P2& pending, const Moment& to, std::size_t block, float absmax) {
    pending.inverse = inverse_absmax(absmax);
    to.absmax[block] = absmax < kSmallestAbsmax ? 0.0F : absmax;
  }

  const Update& u_;
  const Stepper<R> stepper_;
  const MomentBlocks<M, true> m_;
  const MomentBlocks<M, false> v_;
  const Encoder<true> encoder_m_;
  const Encoder<false> encoder_v_;
  Pending<true> pending_m_[2];
  Pending<false> pending_v_[2];
};

template <Rule R, MomentFormat M, MasterFormat P>
std::size_t update_typed(const Update& u, std::size_t begin, std::size_t end) {
  return BlockUpdate<R, M, P>(u).run(begin, end);
}

using TypedUpdate = std::size_t (*)(const Update&, std::size_t, std::size_t);

template <Rule R>
TypedUpdate typed_update(MomentFormat m, MasterFormat p) {
  const bool split = p == MasterFormat::split;
  switch (m) {
    case MomentFormat::block8:
      return split ? update_typed<R, MomentFormat::block8, MasterFormat::split> : update_typed<R, MomentFormat::block8, MasterFormat::bf16_sr>;
    case MomentFormat::f32:
      return split ? update_typed<R, MomentFormat::f32, MasterFormat::split> : update_typed<R, MomentFormat::f32, MasterFormat::bf16_sr>;
    default:
      return split ? update_typed<R, MomentFormat::bf16, MasterFormat::split> : update_typed<R, MomentFormat::bf16, MasterFormat::bf16_sr>;
  }
}

// Whole blocks of moments of one format here; a partial block, and moments of two formats, by the scalar kernel.
inline std::size_t update_blocks(const Update& u, std::size_t begin, std::size_t end) {
  const std::size_t whole = std::min(end, u.n / kBlock);
  if (begin >= whole || (u.from.v.values != nullptr && u.from.m.format != u.from.v.format)) return update_blocks_scalar(u, begin, end);
  TypedUpdate update = nullptr;
  switch (u.rule) {
    case Rule::adamw: update = typed_update<Rule::adamw>(u.from.m.format, u.from.master); break;
    case Rule::adam: update = typed_update<Rule::adam>(u.from.m.format, u.from.master); break;
    case Rule::lion: update = typed_update<Rule::lion>(u.from.m.format, u.from.master); break;
    case Rule::sgd: update = typed_update<Rule::sgd>(u.from.m.format, u.from.master); break;
  }
  return update(u, begin, whole) + update_blocks_scalar(u, whole, end);
}

// Sums of 16 elements' lanes: lane i of the 16 partial sums takes elements i modulo 16, as in the scalar kernel. Squares of bf16 are
// exact in double, so the fused sum rounds once as the separate one does.
inline bool sum_segment(const std::uint16_t* gradient, std::size_t count, double* sum) {
  const hn::ScalableTag<double> d;
  const hn::Half<F> half;
  const hn::Rebind<std::uint16_t, decltype(half)> words;
  const hn::Rebind<std::uint32_t, decltype(half)> wide;
  constexpr std::size_t kDoubles = HWY_MAX_BYTES / 8, kVectors = 16 / kDoubles;
  hn::Vec<decltype(d)> partial[kVectors];
  for (auto& p : partial) p = hn::Zero(d);
  auto largest = hn::Zero(wide);
  const std::size_t whole = count / 16 * 16;
  for (std::size_t i = 0; i < whole; i += 16) {
    for (std::size_t k = 0; k < kVectors; ++k) {
      const auto bits = hn::ShiftLeft<16>(hn::PromoteTo(wide, hn::LoadU(words, gradient + i + k * kDoubles)));
      largest = hn::Max(largest, hn::And(bits, hn::Set(wide, 0x7fff0000U)));
      const auto g = hn::PromoteTo(d, hn::BitCast(half, bits));
      partial[k] = hn::MulAdd(g, g, partial[k]);
    }
  }
  alignas(64) double sums[16];
  for (std::size_t k = 0; k < kVectors; ++k) hn::Store(partial[k], d, sums + k * kDoubles);
  std::uint32_t rest = hn::GetLane(hn::MaxOfLanes(wide, largest)) >> 16;
  for (std::size_t i = whole; i < count; ++i) {
    const double g = widened(gradient[i]);
    sums[i % 16] += g * g;
    rest = std::max(rest, gradient[i] & 0x7fffU);
  }
  *sum = pairwise_sum(sums);
  return rest < 0x7f80U;
}

template <bool Signed>
void encode_codes(const float* values, float inverse, std::uint8_t* codes) {
  const Encoder<Signed> encoder;
  for (std::size_t i = 0; i < kBlock; i += 2 * kUnit)
    encoder.store(load_floats(values + i), load_floats(values + i + kUnit), hn::Set(F(), inverse), codes + i);
}

template <bool Signed>
void decode_codes(const std::uint8_t* codes, float absmax, float* values) {
  const Decoder<Signed> decoder(absmax);
  for (std::size_t i = 0; i < kBlock; i += kUnit) store_floats(decoder.load(codes + i), values + i);
}

inline void encode_block(const float* values, bool is_signed, float inverse, std::uint8_t* codes) {
  is_signed ? encode_codes<true>(values, inverse, codes) : encode_codes<false>(values, inverse, codes);
}

inline void decode_block(const std::uint8_t* codes, bool is_signed, float absmax, float* values) {
  is_signed ? decode_codes<true>(codes, absmax, values) : decode_codes<false>(codes, absmax, values);
}

inline Kernels vector_kernels(const char* name) { return {name, update_blocks, sum_segment, encode_block, decode_block}; }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace tierflow::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // fused multiply-add

#endif  // toggle

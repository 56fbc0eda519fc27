// What an update on vectors is made of: one step of the arithmetic, floats in memory, the moments of one block. Once
// for each instruction set; same arithmetic, in the same order, as step.h.
#if defined(TIERFLOW_OPTIM_MOMENTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TIERFLOW_OPTIM_MOMENTS_INL_H_
#undef TIERFLOW_OPTIM_MOMENTS_INL_H_
#else
#define TIERFLOW_OPTIM_MOMENTS_INL_H_
#endif

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include "optim/codec-inl.h"
#include "optim/step.h"

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
      const VF sign =
          hn::IfThenElse(hn::Gt(direction, zero), one, hn::IfThenElseZero(hn::Lt(direction, zero), minus_one));
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
#if HWY_TARGET <= HWY_AVX3
  return {VF{_mm512_shuffle_f32x4(x.raw, y.raw, 0x88)}, VF{_mm512_shuffle_f32x4(x.raw, y.raw, 0xdd)}};
#elif HWY_TARGET == HWY_AVX2
  return {hn::ConcatLowerLower(F(), y, x), hn::ConcatUpperUpper(F(), y, x)};
#else
  return {x, y};
#endif
}

HWY_INLINE void store_floats(Pair p, float* at) {
#if HWY_TARGET <= HWY_AVX3
  const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11),
                second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  const __m512d a = _mm512_castps_pd(p.a.raw), b = _mm512_castps_pd(p.b.raw);
  _mm512_storeu_pd(at, _mm512_permutex2var_pd(a, first, b));
  _mm512_storeu_pd(at + kLanes, _mm512_permutex2var_pd(a, second, b));
#elif HWY_TARGET == HWY_AVX2
  hn::StoreU(hn::ConcatLowerLower(F(), p.b, p.a), F(), at);
  hn::StoreU(hn::ConcatUpperUpper(F(), p.b, p.a), F(), at + kLanes);
#else
  hn::StoreU(p.a, F(), at);
  hn::StoreU(p.b, F(), at + kLanes);
#endif
}

// One moment of one block: decoded unit by unit; for block8, kept as floats until the block's absmax is known and
// encoded beside the next block's arithmetic.
template <MomentFormat M, bool Signed>
struct MomentBlocks {
  const Moment from, to;

  template <class T>
  static HWY_INLINE void fetch(const void* values, std::size_t element) {
    const auto address = reinterpret_cast<std::uintptr_t>(static_cast<const T*>(values) + element) + kAhead;
    for (std::size_t line = 0; line < kUnit * sizeof(T); line += 64)
      hwy::Prefetch(reinterpret_cast<const char*>(address) + line);
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
      hn::Store(packed_words(narrowed_word(p.a), narrowed_word(p.b)), Words(),
                static_cast<std::uint16_t*>(to.values) + element);
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
  HWY_INLINE float value() const {
    return float_of(static_cast<std::uint32_t>(hn::GetLane(hn::MaxOfLanes(I(), hn::Max(a, b)))));
  }
};

HWY_INLINE bool block_within(const std::uint16_t* gradient, std::uint16_t largest_allowed) {
  VW largest = hn::Zero(Words());
  const VW magnitude = hn::Set(Words(), 0x7fff);
  for (std::size_t i = 0; i < kBlock; i += kUnit)
    largest = hn::Max(largest, hn::And(hn::Load(Words(), gradient + i), magnitude));
  return hn::AllFalse(SignedWords(), hn::Gt(hn::BitCast(SignedWords(), largest),
                                            hn::Set(SignedWords(), static_cast<std::int16_t>(largest_allowed))));
}

// The largest gradient magnitude, as bits, that is `within` the scale; 0 where none is: then even zeros count as not
// finite.
inline int largest_allowed(float scale) {
  int low = -1, high = 0x7f80;  // low is allowed, high is not
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (within(static_cast<std::uint32_t>(middle), scale) ? low : high) = middle;
  }
  return low;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace tierflow::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle

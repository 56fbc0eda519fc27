// The update on vectors, once for each instruction set. Same arithmetic, in the same order, as step.h and scalar.cpp.
#if defined(TIERFLOW_OPTIM_UPDATE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TIERFLOW_OPTIM_UPDATE_INL_H_
#undef TIERFLOW_OPTIM_UPDATE_INL_H_
#else
#define TIERFLOW_OPTIM_UPDATE_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>

#include "optim/kernels.h"

#if HWY_TARGET != HWY_SSE2 && HWY_TARGET != HWY_EMU128 && HWY_TARGET != HWY_SCALAR
#include "optim/moments-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tierflow::optim::HWY_NAMESPACE {

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

  // Where a block's units are; in registers, as stores of codes could change what memory holds.
  struct Place {
    const std::uint16_t *gradient, *hi, *lo;
    std::uint16_t *to_hi, *to_lo;
    const std::uint8_t *m, *v;
    std::uint8_t *codes_m, *codes_v;  // of the block before
    Pending<true>* pending_m;
    Pending<false>* pending_v;
    const Pending<true>* encoded_m;
    const Pending<false>* encoded_v;
  };

  HWY_INLINE Place place_of(std::size_t block) {
    const std::size_t at = block * kBlock;
    Place p{};
    p.gradient = u_.gradient + at, p.hi = u_.from.hi + at, p.to_hi = u_.to.hi + at;
    if constexpr (P == MasterFormat::split) p.lo = u_.from.lo + at, p.to_lo = u_.to.lo + at;
    if constexpr (k8) {
      p.m = codes(u_.from.m, block), p.codes_m = mutable_codes(u_.to.m, block) - kBlock;
      p.pending_m = &pending_m_[block % 2], p.encoded_m = &pending_m_[1 - block % 2];
      if constexpr (kV) {
        p.v = codes(u_.from.v, block), p.codes_v = mutable_codes(u_.to.v, block) - kBlock;
        p.pending_v = &pending_v_[block % 2], p.encoded_v = &pending_v_[1 - block % 2];
      }
    }
    return p;
  }

  static HWY_INLINE Pair load_master(const Place& place, std::size_t i) {
    const VW hi = hn::Load(Words(), place.hi + i);
    if constexpr (P == MasterFormat::bf16_sr) return widened_pair(hi);
    return joined_pair(hi, hn::Load(Words(), place.lo + i));
  }

  HWY_INLINE void store_master(Pair p, const Place& place, std::size_t i, std::size_t element, RoundingKey key) const {
    if constexpr (P == MasterFormat::split) {
      hn::Store(hi_words(p), Words(), place.to_hi + i);
      hn::Store(lo_words(p), Words(), place.to_lo + i);
    } else {
      const VU iota = hn::Iota(U(), 0), in_unit = hn::Add(iota, hn::AndNot(hn::Set(U(), 3), iota));
      const VU index = hn::Add(hn::Set(U(), static_cast<std::uint32_t>(u_.first_element + element)), in_unit);
      const VU a = stochastically_narrowed_word(p.a, key, index);
      const VU b = stochastically_narrowed_word(p.b, key, hn::Add(index, hn::Set(U(), 4)));
      hn::Store(packed_words(a, b), Words(), place.to_hi + i);
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

  HWY_INLINE void update_unit(const Place& place, std::size_t block, std::size_t unit, Running& r) {
    const std::size_t i = unit * kUnit, element = block * kBlock + i;
    fetch(place.gradient + i);
    fetch(place.hi + i);
    if constexpr (P == MasterFormat::split) fetch(place.lo + i);
    const Pair g = widened_pair(hn::Load(Words(), place.gradient + i));
    Pair p = load_master(place, i), m, v{hn::Zero(F()), hn::Zero(F())};
    if constexpr (k8) {
      m = r.decode_m.load(place.m + i);
      if constexpr (kV) v = r.decode_v.load(place.v + i);
    } else {
      m = m_.load(element);
      if constexpr (kV) v = v_.load(element);
    }
    stepper_.step(g.a, p.a, m.a, v.a);
    stepper_.step(g.b, p.b, m.b, v.b);
    store_master(p, place, i, element, r.key);
    if constexpr (k8) {
      place.pending_m->put(unit, m);
      r.largest_m.template take<true>(m);
      if constexpr (kV) {
        place.pending_v->put(unit, v);
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
    const Place place = place_of(block);
    for (std::size_t unit = 0; unit < kUnits; unit += 2) {
      if constexpr (k8) {
        fetch(place.m + unit * kUnit);
        if constexpr (kV) fetch(place.v + unit * kUnit);
      }
      update_unit(place, block, unit, r);
      update_unit(place, block, unit + 1, r);
      if constexpr (k8 && Encode) {
        place.encoded_m->encode(encoder_m_, unit, place.codes_m);
        if constexpr (kV) place.encoded_v->encode(encoder_v_, unit, place.codes_v);
      }
    }
    if constexpr (k8) {
      finish(*place.pending_m, u_.to.m, block, r.largest_m.value());
      if constexpr (kV) finish(*place.pending_v, u_.to.v, block, r.largest_v.value());
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
      return split ? update_typed<R, MomentFormat::block8, MasterFormat::split>
                   : update_typed<R, MomentFormat::block8, MasterFormat::bf16_sr>;
    case MomentFormat::f32:
      return split ? update_typed<R, MomentFormat::f32, MasterFormat::split>
                   : update_typed<R, MomentFormat::f32, MasterFormat::bf16_sr>;
    default:
      return split ? update_typed<R, MomentFormat::bf16, MasterFormat::split>
                   : update_typed<R, MomentFormat::bf16, MasterFormat::bf16_sr>;
  }
}

// Whole blocks of moments of one format here; a partial block, and moments of two formats, by the scalar kernel.
inline std::size_t update_blocks(const Update& u, std::size_t begin, std::size_t end) {
  const std::size_t whole = std::min(end, u.n / kBlock);
  if (begin >= whole || (u.from.v.values != nullptr && u.from.m.format != u.from.v.format))
    return update_blocks_scalar(u, begin, end);
  TypedUpdate update = nullptr;
  switch (u.rule) {
    case Rule::adamw:
      update = typed_update<Rule::adamw>(u.from.m.format, u.from.master);
      break;
    case Rule::adam:
      update = typed_update<Rule::adam>(u.from.m.format, u.from.master);
      break;
    case Rule::lion:
      update = typed_update<Rule::lion>(u.from.m.format, u.from.master);
      break;
    case Rule::sgd:
      update = typed_update<Rule::sgd>(u.from.m.format, u.from.master);
      break;
  }
  return update(u, begin, whole) + update_blocks_scalar(u, whole, end);
}

// Sums of 16 elements' lanes: lane i of the 16 partial sums takes elements i modulo 16, as in the scalar kernel.
// Squares of bf16 are exact in double, so the fused sum rounds once as the separate one does.
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

inline Kernels vector_kernels(const char* name) {
  return {name, update_blocks, sum_segment, encode_block, decode_block};
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace tierflow::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // fused multiply-add

#endif  // toggle

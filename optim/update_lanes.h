#pragma once
// The update of one block, and one partial sum of squares, by lanes that work at the same time: the body of the device
// kernels. Each lane's share is for host and device; how lanes find the largest of their numbers is the caller's
// (`Lanes`: a warp on a device, a loop on the host), so that a machine without a device tests everything but that.
#include "optim/kernels.h"

namespace tierflow::optim {

inline constexpr int kUpdateLanes = 32;  // of a block
inline constexpr int kLaneElements = static_cast<int>(kBlock) / kUpdateLanes;
inline constexpr int kSumLanes = 16;  // of a partial sum: lane i adds elements i, i + 16, ...

template <class T>
struct alignas(kLaneElements * sizeof(T) < 16 ? kLaneElements * sizeof(T) : 16) LanePack {
  T at[kLaneElements];
};

// One lane's elements of one block.
class LaneBlock {
 public:
  // Places the lane and looks at its gradients; their largest magnitude as the bits of a bf16.
  TIERFLOW_HD std::uint32_t begin(const Update& u, std::size_t block, int lane) {
    const std::size_t left = u.n - block * kBlock, before = static_cast<std::size_t>(lane) * kLaneElements;
    block_ = block;
    first_ = block * kBlock + before;
    count_ = left <= before ? 0 : left - before >= kLaneElements ? kLaneElements : static_cast<int>(left - before);
    words_ = load<std::uint16_t>(u.gradient);
    std::uint32_t largest = 0;
    for (int i = 0; i < kLaneElements; ++i) {
      const std::uint32_t magnitude = words_.at[i] & 0x7fffU;
      largest = largest < magnitude ? magnitude : largest;
    }
    return largest;
  }

  // Loads the state and steps it. Elements beyond the call are zeros and stay so: they add nothing to an absmax.
  template <Rule R>
  TIERFLOW_HD void step(const Update& u) {
    load_master(u.from);
    load_moment<true>(u.from.m, m_);
    load_moment<false>(u.from.v, v_);
    for (int i = 0; i < kLaneElements; ++i) {
      const Element e = stepped<R>(u.k, widened(words_.at[i]), {p_.at[i], m_.at[i], v_.at[i]});
      p_.at[i] = e.p;
      m_.at[i] = e.m;
      v_.at[i] = e.v;
    }
  }

  // Compared as bits, so that a NaN is larger than all else.
  TIERFLOW_HD std::uint32_t largest_m() const { return largest(m_); }
  TIERFLOW_HD std::uint32_t largest_v() const { return largest(v_); }

  TIERFLOW_HD void store(const Update& u, std::uint32_t largest_m, std::uint32_t largest_v) const {
    store_master(u);
    store_moment<true>(u.to.m, m_, float_of(largest_m));
    if (u.from.v.values != nullptr) store_moment<false>(u.to.v, v_, float_of(largest_v));
  }

  // Leaves the block as it was.
  TIERFLOW_HD void copy(const Update& u) const {
    if (u.from.hi != u.to.hi) put(u.to.hi, load<std::uint16_t>(u.from.hi));
    if (u.from.lo != u.to.lo) put(u.to.lo, load<std::uint16_t>(u.from.lo));
    copy_moment(u.from.m, u.to.m);
    copy_moment(u.from.v, u.to.v);
  }

  TIERFLOW_HD int count() const { return count_; }

 private:
  using Floats = LanePack<float>;

  template <class T>
  TIERFLOW_HD LanePack<T> load(const void* values) const {
    const T* from = static_cast<const T*>(values) + first_;
    if (count_ == kLaneElements) return *reinterpret_cast<const LanePack<T>*>(from);
    LanePack<T> pack{};
    for (int i = 0; i < kLaneElements; ++i)
      if (i < count_) pack.at[i] = from[i];
    return pack;
  }
  template <class T>
  TIERFLOW_HD void put(void* values, const LanePack<T>& pack) const {
    T* to = static_cast<T*>(values) + first_;
    if (count_ == kLaneElements) {
      *reinterpret_cast<LanePack<T>*>(to) = pack;
      return;
    }
    for (int i = 0; i < kLaneElements; ++i)
      if (i < count_) to[i] = pack.at[i];
  }

  TIERFLOW_HD void load_master(const State& state) {
    const auto hi = load<std::uint16_t>(state.hi);
    if (state.master == MasterFormat::split) {
      const auto lo = load<std::uint16_t>(state.lo);
      for (int i = 0; i < kLaneElements; ++i) p_.at[i] = float_of(joined(hi.at[i], lo.at[i]));
    } else {
      for (int i = 0; i < kLaneElements; ++i) p_.at[i] = widened(hi.at[i]);
    }
  }
  TIERFLOW_HD void store_master(const Update& u) const {
    LanePack<std::uint16_t> hi{}, lo{};
    if (u.from.master == MasterFormat::split) {
      for (int i = 0; i < kLaneElements; ++i) {
        hi.at[i] = hi_of(bits_of(p_.at[i]));
        lo.at[i] = lo_of(bits_of(p_.at[i]));
      }
      put(u.to.lo, lo);
    } else {
      const std::uint64_t element = u.first_element + first_;
      const RoundingKey key = rounding_key(u.key, u.step, element);
      for (int i = 0; i < kLaneElements; ++i)
        hi.at[i] = stochastically_narrowed(p_.at[i], rounding_bits(key, static_cast<std::uint32_t>(element + i)));
    }
    put(u.to.hi, hi);
  }

  template <bool Signed>
  TIERFLOW_HD void load_moment(const Moment& moment, Floats& to) const {
    if (moment.values == nullptr) {
      to = {};
    } else if (moment.format == MomentFormat::block8) {
      const auto codes = load<std::uint8_t>(moment.values);
      const float absmax = moment.absmax[block_];
      for (int i = 0; i < kLaneElements; ++i) to.at[i] = i < count_ ? decoded<Signed>(codes.at[i], absmax) : 0.0F;
    } else if (moment.format == MomentFormat::bf16) {
      const auto words = load<std::uint16_t>(moment.values);
      for (int i = 0; i < kLaneElements; ++i) to.at[i] = widened(words.at[i]);
    } else {
      to = load<float>(moment.values);
    }
  }
  template <bool Signed>
  TIERFLOW_HD void store_moment(const Moment& moment, const Floats& from, float absmax) const {
    if (moment.format == MomentFormat::block8) {
      const float inverse = inverse_absmax(absmax);
      LanePack<std::uint8_t> codes;
      for (int i = 0; i < kLaneElements; ++i) codes.at[i] = encoded<Signed>(from.at[i], inverse);
      put(moment.values, codes);
      if (leads()) moment.absmax[block_] = absmax < kSmallestAbsmax ? 0.0F : absmax;
    } else if (moment.format == MomentFormat::bf16) {
      LanePack<std::uint16_t> words;
      for (int i = 0; i < kLaneElements; ++i) words.at[i] = narrowed(from.at[i]);
      put(moment.values, words);
    } else {
      put(moment.values, from);
    }
  }
  TIERFLOW_HD void copy_moment(const Moment& from, const Moment& to) const {
    if (from.values == to.values || from.values == nullptr) return;
    switch (from.format) {
      case MomentFormat::block8:
        put(to.values, load<std::uint8_t>(from.values));
        if (leads()) to.absmax[block_] = from.absmax[block_];
        return;
      case MomentFormat::bf16:
        put(to.values, load<std::uint16_t>(from.values));
        return;
      case MomentFormat::f32:
        put(to.values, load<float>(from.values));
    }
  }

  TIERFLOW_HD bool leads() const { return first_ == block_ * kBlock; }
  TIERFLOW_HD static std::uint32_t largest(const Floats& values) {
    std::uint32_t largest = 0;
    for (int i = 0; i < kLaneElements; ++i) {
      const std::uint32_t magnitude = bits_of(values.at[i]) & 0x7fffffffU;
      largest = largest < magnitude ? magnitude : largest;
    }
    return largest;
  }

  std::size_t block_ = 0, first_ = 0;  // the block, and the lane's first element in the call
  int count_ = 0;                      // of the lane's elements that there are
  LanePack<std::uint16_t> words_{};
  Floats p_{}, m_{}, v_{};
};

// Updates block `block`, or copies it where a gradient of it is not finite; false then. `Lanes` has each(f), which
// calls f(lane, LaneBlock&) on every lane, and largest(f), the largest f(LaneBlock&) of all lanes, on every lane.
template <Rule R, class Lanes>
TIERFLOW_LANES bool update_block_in_lanes(Lanes& lanes, const Update& u, std::size_t block) {
  const std::uint32_t gradient = lanes.largest([&](int lane, LaneBlock& own) { return own.begin(u, block, lane); });
  if (!within(gradient, u.k.scale)) {
    lanes.each([&](LaneBlock& own) { own.copy(u); });
    return false;
  }
  lanes.each([&](LaneBlock& own) { own.template step<R>(u); });
  const std::uint32_t m = lanes.largest([](int, LaneBlock& own) { return own.largest_m(); });
  const std::uint32_t v = lanes.largest([](int, LaneBlock& own) { return own.largest_v(); });
  lanes.each([&](LaneBlock& own) { own.store(u, m, v); });
  return true;
}

// One lane of a partial sum of squares.
class LaneSum {
 public:
  // Adds the lane's share of count <= kNormSegment elements; their largest magnitude as the bits of a bf16.
  TIERFLOW_HD std::uint32_t begin(const std::uint16_t* gradient, std::size_t count, int lane) {
    std::uint32_t largest = 0;
    sum = 0;
    for (std::size_t i = static_cast<std::size_t>(lane); i < count; i += kSumLanes) {
      const std::uint32_t magnitude = gradient[i] & 0x7fffU;
      const double g = widened(gradient[i]);
      sum += g * g;
      largest = largest < magnitude ? magnitude : largest;
    }
    return largest;
  }

  double sum = 0;
};

// The sum that sum_segment gives, on lane 0; false where an element is not finite. `Lanes` as above, of LaneSum, and
// fold(apart), after which every lane i < apart has added the sum of lane i + apart to its own.
template <class Lanes>
TIERFLOW_LANES bool sum_segment_in_lanes(Lanes& lanes, const std::uint16_t* gradient, std::size_t count) {
  const std::uint32_t largest = lanes.largest([&](int lane, LaneSum& own) { return own.begin(gradient, count, lane); });
  for (int apart = kSumLanes / 2; apart > 0; apart /= 2) lanes.fold(apart);
  return largest < 0x7f80U;
}

}  // namespace tierflow::optim

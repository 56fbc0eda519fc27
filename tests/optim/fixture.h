#pragma once
// Aligned arrays, random numbers and whole states for the optimizer's tests.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <vector>

#include "optim/adamw.h"
#include "optim/block_codec.h"

namespace tierflow::optim {

template <class T>
struct Aligned64 {
  using value_type = T;
  Aligned64() = default;
  template <class U>
  Aligned64(const Aligned64<U>&) {}
  T* allocate(std::size_t n) { return static_cast<T*>(::operator new (n * sizeof(T), std::align_val_t{64})); }
  void deallocate(T* p, std::size_t) { ::operator delete (p, std::align_val_t{64}); }
  bool operator==(const Aligned64&) const { return true; }
};

template <class T>
using Array = std::vector<T, Aligned64<T>>;

inline std::size_t blocks_of(std::size_t n) {
  return (n + kBlock - 1) / kBlock;
}

struct MomentArray {
  MomentFormat format;
  Array<std::uint8_t> bytes;
  Array<float> absmax;

  MomentArray(MomentFormat f, std::size_t n, bool is_signed) : format(f), bytes(4 * n + 64), absmax(blocks_of(n) + 1) {
    zero_moment(view(), n, is_signed);
  }
  Moment view(std::size_t first = 0) {
    const std::size_t size = format == MomentFormat::block8 ? 1 : format == MomentFormat::bf16 ? 2 : 4;
    return {format, bytes.data() + size * first,
            format == MomentFormat::block8 ? absmax.data() + first / kBlock : nullptr};
  }
  bool operator==(const MomentArray& o) const {
    return bytes == o.bytes && std::memcmp(absmax.data(), o.absmax.data(), 4 * absmax.size()) == 0;
  }
};

struct StateArrays {
  MasterFormat master;
  Array<std::uint16_t> hi, lo;
  MomentArray m, v;

  StateArrays(MasterFormat f, MomentFormat moments, std::size_t n)
      : master(f), hi(n + 32), lo(n + 32), m(moments, n, true), v(moments, n, false) {}
  State view(std::size_t first = 0) {
    return {master, hi.data() + first, master == MasterFormat::split ? lo.data() + first : nullptr, m.view(first),
            v.view(first)};
  }
  bool operator==(const StateArrays& o) const { return hi == o.hi && lo == o.lo && m == o.m && v == o.v; }
};

// Weights of scale 0.02, moments as some steps of training leave them: magnitudes over several decades, whole blocks of
// zeros.
inline void fill(StateArrays& s, std::size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> p(n), m(n), v(n);
  for (std::size_t i = 0; i < n; ++i) {
    const bool zero = (i / kBlock) % 7 == 5;
    p[i] = 0.02F * normal(random);
    const float size = std::exp(3 * normal(random)) * 1e-4F;
    m[i] = zero ? 0 : size * normal(random);
    v[i] = zero ? 0 : size * size * std::abs(normal(random));
  }
  if (s.master == MasterFormat::split)
    split_master(p.data(), s.hi.data(), s.lo.data(), n);
  else
    for (std::size_t i = 0; i < n; ++i) s.hi[i] = bf16_from_float(p[i]);
  encode_moment(m.data(), s.m.view(), n, true);
  encode_moment(v.data(), s.v.view(), n, false);
}

inline Array<std::uint16_t> gradients(std::size_t n, unsigned seed, float size = 1e-3F) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Array<std::uint16_t> g(n + 32);
  for (std::size_t i = 0; i < n; ++i)
    g[i] = i % 11 == 3 ? 0 : bf16_from_float(size * std::exp(normal(random)) * normal(random));
  return g;
}

// ULPs between two finite floats.
inline std::int64_t ulps(float a, float b) {
  const auto line = [](float x) {
    const auto bits = static_cast<std::int64_t>(bits_of(x) & 0x7fffffffU);
    return std::signbit(x) ? -bits : bits;
  };
  return std::abs(line(a) - line(b));
}

}  // namespace tierflow::optim

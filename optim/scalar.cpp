// The scalar kernels: slow, and the definition of every bit that the vector kernels produce.
#include <algorithm>
#include <cstring>

#include "optim/kernels.h"

namespace tierflow::optim {
namespace {

template <bool Signed>
void load_codes(const std::uint8_t* codes, float absmax, std::size_t count, float* values) {
  for (std::size_t i = 0; i < count; ++i) values[i] = decoded<Signed>(codes[i], absmax);
}

template <bool Signed>
float store_codes(const float* values, std::size_t count, std::uint8_t* codes) {
  std::uint32_t largest = 0;  // compared as bits, so that a NaN is larger than all else
  for (std::size_t i = 0; i < count; ++i) largest = std::max(largest, bits_of(values[i]) & 0x7fffffffU);
  const float absmax = float_of(largest);
  const float inverse = inverse_absmax(absmax);
  for (std::size_t i = 0; i < count; ++i) codes[i] = encoded<Signed>(values[i], inverse);
  return absmax < kSmallestAbsmax ? 0.0F : absmax;
}

template <Rule R>
void step_elements(const Coefficients& k, const float* g, float* p, float* m, float* v, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const Element e = stepped<R>(k, g[i], {p[i], m[i], v[i]});
    p[i] = e.p;
    m[i] = e.m;
    v[i] = e.v;
  }
}

void step_by_rule(const Update& u, const float* g, float* p, float* m, float* v, std::size_t count) {
  switch (u.rule) {
    case Rule::adamw:
      return step_elements<Rule::adamw>(u.k, g, p, m, v, count);
    case Rule::adam:
      return step_elements<Rule::adam>(u.k, g, p, m, v, count);
    case Rule::lion:
      return step_elements<Rule::lion>(u.k, g, p, m, v, count);
    case Rule::sgd:
      return step_elements<Rule::sgd>(u.k, g, p, m, v, count);
  }
}

void copy_moment(const Moment& from, const Moment& to, std::size_t block, std::size_t count) {
  if (from.values == to.values || from.values == nullptr) return;
  const std::size_t size = from.format == MomentFormat::block8 ? 1 : from.format == MomentFormat::bf16 ? 2 : 4;
  const std::size_t offset = block * kBlock * size;
  std::memcpy(static_cast<std::byte*>(to.values) + offset, static_cast<const std::byte*>(from.values) + offset,
              count * size);
  if (from.format == MomentFormat::block8) to.absmax[block] = from.absmax[block];
}

bool update_block(const Update& u, std::size_t block) {
  const std::size_t first = block * kBlock, count = std::min(kBlock, u.n - first);
  float g[kBlock], p[kBlock], m[kBlock] = {}, v[kBlock] = {};
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    largest = std::max(largest, u.gradient[first + i] & 0x7fffU);
    g[i] = widened(u.gradient[first + i]);
  }
  if (!within(largest, u.k.scale)) return false;
  const bool split = u.from.master == MasterFormat::split;
  for (std::size_t i = 0; i < count; ++i)
    p[i] = split ? float_of(joined(u.from.hi[first + i], u.from.lo[first + i])) : widened(u.from.hi[first + i]);
  load_moment_block(u.from.m, block, count, true, m);
  if (u.from.v.values != nullptr) load_moment_block(u.from.v, block, count, false, v);

  step_by_rule(u, g, p, m, v, count);

  const std::uint64_t element = u.first_element + first;
  const RoundingKey key = rounding_key(u.key, u.step, element);
  for (std::size_t i = 0; i < count; ++i) {
    if (split) {
      u.to.hi[first + i] = hi_of(bits_of(p[i]));
      u.to.lo[first + i] = lo_of(bits_of(p[i]));
    } else {
      u.to.hi[first + i] = stochastically_narrowed(p[i], rounding_bits(key, static_cast<std::uint32_t>(element + i)));
    }
  }
  store_moment_block(u.to.m, block, count, true, m);
  if (u.from.v.values != nullptr) store_moment_block(u.to.v, block, count, false, v);
  return true;
}

}  // namespace

void copy_block(const Update& u, std::size_t block) {
  const std::size_t first = block * kBlock, count = std::min(kBlock, u.n - first);
  if (u.from.hi != u.to.hi) std::memcpy(u.to.hi + first, u.from.hi + first, 2 * count);
  if (u.from.lo != u.to.lo) std::memcpy(u.to.lo + first, u.from.lo + first, 2 * count);
  copy_moment(u.from.m, u.to.m, block, count);
  copy_moment(u.from.v, u.to.v, block, count);
}

std::size_t update_blocks_scalar(const Update& u, std::size_t begin, std::size_t end) {
  std::size_t skipped = 0;
  for (std::size_t block = begin; block < end; ++block) {
    if (update_block(u, block)) continue;
    copy_block(u, block);
    skipped += std::min(kBlock, u.n - block * kBlock);
  }
  return skipped;
}

void load_moment_block(const Moment& moment, std::size_t at, std::size_t count, bool is_signed, float* values) {
  const std::size_t first = at * kBlock;
  switch (moment.format) {
    case MomentFormat::block8: {
      const auto* codes = static_cast<const std::uint8_t*>(moment.values) + first;
      return is_signed ? load_codes<true>(codes, moment.absmax[at], count, values)
                       : load_codes<false>(codes, moment.absmax[at], count, values);
    }
    case MomentFormat::f32:
      std::memcpy(values, static_cast<const float*>(moment.values) + first, 4 * count);
      return;
    case MomentFormat::bf16: {
      const auto* words = static_cast<const std::uint16_t*>(moment.values) + first;
      for (std::size_t i = 0; i < count; ++i) values[i] = widened(words[i]);
    }
  }
}

void store_moment_block(const Moment& moment, std::size_t at, std::size_t count, bool is_signed, const float* values) {
  const std::size_t first = at * kBlock;
  switch (moment.format) {
    case MomentFormat::block8: {
      auto* codes = static_cast<std::uint8_t*>(moment.values) + first;
      moment.absmax[at] =
          is_signed ? store_codes<true>(values, count, codes) : store_codes<false>(values, count, codes);
      return;
    }
    case MomentFormat::f32:
      std::memcpy(static_cast<float*>(moment.values) + first, values, 4 * count);
      return;
    case MomentFormat::bf16: {
      auto* words = static_cast<std::uint16_t*>(moment.values) + first;
      for (std::size_t i = 0; i < count; ++i) words[i] = narrowed(values[i]);
    }
  }
}

void encode_block_scalar(const float* values, bool is_signed, float inverse, std::uint8_t* codes) {
  for (std::size_t i = 0; i < kBlock; ++i)
    codes[i] = is_signed ? encoded<true>(values[i], inverse) : encoded<false>(values[i], inverse);
}

void decode_block_scalar(const std::uint8_t* codes, bool is_signed, float absmax, float* values) {
  is_signed ? load_codes<true>(codes, absmax, kBlock, values) : load_codes<false>(codes, absmax, kBlock, values);
}

double pairwise_sum(double* partial) {
  for (std::size_t apart = 8; apart > 0; apart /= 2)
    for (std::size_t i = 0; i < apart; ++i) partial[i] += partial[i + apart];
  return partial[0];
}

bool sum_segment_scalar(const std::uint16_t* gradient, std::size_t count, double* sum) {
  double partial[16] = {};
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const double g = widened(gradient[i]);
    partial[i % 16] += g * g;
    largest = std::max(largest, gradient[i] & 0x7fffU);
  }
  *sum = pairwise_sum(partial);
  return largest < 0x7f80U;
}

double sum_of_squares(const float* values, std::size_t count) {
  double sums[16] = {};
  for (std::size_t i = 0; i < count; ++i) sums[i % 16] += static_cast<double>(values[i]) * values[i];
  return pairwise_sum(sums);
}

}  // namespace tierflow::optim

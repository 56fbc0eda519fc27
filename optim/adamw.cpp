#include "optim/adamw.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "optim/kernels.h"

namespace tierflow::optim {
namespace {

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(std::string("optim: ") + what);
}

bool aligned(const void* pointer, std::size_t alignment) {
  return reinterpret_cast<std::uintptr_t>(pointer) % alignment == 0;
}

void check(const Moment& moment) {
  require(moment.format == MomentFormat::block8 || moment.format == MomentFormat::f32 ||
              moment.format == MomentFormat::bf16,
          "unknown moment format");
  require(moment.values != nullptr && aligned(moment.values, 64), "moment values must be aligned to 64 bytes");
  if (moment.format == MomentFormat::block8)
    require(moment.absmax != nullptr && aligned(moment.absmax, 4), "block8 needs absmax, aligned to 4 bytes");
}

void check(const State& state, bool needs_v) {
  require(state.master == MasterFormat::split || state.master == MasterFormat::bf16_sr, "unknown master format");
  require(state.hi != nullptr && aligned(state.hi, 64), "hi must be aligned to 64 bytes");
  if (state.master == MasterFormat::split)
    require(state.lo != nullptr && aligned(state.lo, 64), "lo must be aligned to 64 bytes");
  check(state.m);
  if (needs_v) check(state.v);
}

// The scaled gradient, or the change of the master, of one block as floats.
double squares_of_gradient(const Update& u, std::size_t block) {
  const std::size_t first = block * kBlock, count = std::min(kBlock, u.n - first);
  float g[kBlock];
  for (std::size_t i = 0; i < count; ++i) g[i] = widened(u.gradient[first + i]) * u.k.scale;
  return sum_of_squares(g, count);
}

std::size_t load_master(const State& state, std::size_t first, std::size_t count, float* p) {
  for (std::size_t i = 0; i < count; ++i)
    p[i] = state.master == MasterFormat::split ? float_of(joined(state.hi[first + i], state.lo[first + i]))
                                               : widened(state.hi[first + i]);
  return count;
}

UpdateResult run_with_reports(const Kernels& kernels, const Update& u, const BlockReports& reports) {
  UpdateResult result;
  float before[kBlock], after[kBlock];
  for (std::size_t block = 0, first = 0; first < u.n; ++block, first += kBlock) {
    const std::size_t count = std::min(kBlock, u.n - first);
    if (reports.update_squares != nullptr) load_master(u.from, first, count, before);
    if (reports.gradient_squares != nullptr) reports.gradient_squares[block] = squares_of_gradient(u, block);
    const std::size_t skipped = kernels.update_blocks(u, block, block + 1);
    (skipped > 0 ? result.skipped : result.updated) += count;
    if (reports.finite != nullptr) reports.finite[block] = skipped > 0 ? 0 : 1;
    if (reports.update_squares != nullptr) {
      load_master(u.to, first, count, after);
      for (std::size_t i = 0; i < count; ++i) after[i] = skipped > 0 ? 0.0F : after[i] - before[i];
      reports.update_squares[block] = sum_of_squares(after, count);
    }
  }
  return result;
}

Moment moment_from(Moment moment, std::size_t first) {
  const std::size_t size = moment.format == MomentFormat::block8 ? 1 : moment.format == MomentFormat::bf16 ? 2 : 4;
  if (moment.values != nullptr) moment.values = static_cast<std::byte*>(moment.values) + size * first;
  if (moment.absmax != nullptr) moment.absmax += first / kBlock;
  return moment;
}

}  // namespace

State state_from(const State& state, std::size_t first) {
  return {.master = state.master,
          .hi = state.hi + first,
          .lo = state.lo == nullptr ? nullptr : state.lo + first,
          .m = moment_from(state.m, first),
          .v = moment_from(state.v, first)};
}

Update digested(const AdamWParams& params, const std::uint16_t* gradient, const State& from, const State& to,
                std::size_t n) {
  const bool adam = params.rule == Rule::adamw || params.rule == Rule::adam;
  require(adam || params.rule == Rule::lion || params.rule == Rule::sgd, "unknown rule");
  require(params.step >= 1, "step counts from 1");
  require(params.first_element % kBlock == 0, "first_element must be a multiple of the block");
  require(n == 0 || (gradient != nullptr && aligned(gradient, 64)), "the gradient must be aligned to 64 bytes");
  if (n > 0) {
    check(from, adam);
    check(to, adam);
  }
  require(from.master == to.master && from.m.format == to.m.format && (!adam || from.v.format == to.v.format),
          "both states must have the same formats");

  const FloatEnvironment environment;
  const bool eight_bit = from.m.format == MomentFormat::block8 || from.v.format == MomentFormat::block8;
  Update u;
  u.k = coefficients_of(params, eight_bit);
  u.rule = params.rule;
  u.gradient = gradient;
  u.from = from;
  u.to = to;
  if (!adam) u.from.v = u.to.v = {};
  u.n = n;
  u.key = params.rounding_key;
  u.step = static_cast<std::uint64_t>(params.step);
  u.first_element = params.first_element;
  return u;
}

UpdateResult update_with(const Kernels& kernels, const AdamWParams& params, const std::uint16_t* gradient,
                         const State& from, const State& to, std::size_t n, const BlockReports& reports) {
  if (n == 0) return {};
  const Update u = digested(params, gradient, from, to, n);
  const FloatEnvironment environment;
  const std::size_t blocks = (n + kBlock - 1) / kBlock;
  if (params.skip_call_if_not_finite && !all_within(gradient, n, u.k.scale)) {
    for (std::size_t block = 0; block < blocks; ++block) {
      copy_block(u, block);
      if (reports.gradient_squares != nullptr) reports.gradient_squares[block] = squares_of_gradient(u, block);
      if (reports.update_squares != nullptr) reports.update_squares[block] = 0;
      if (reports.finite != nullptr) {
        const std::size_t first = block * kBlock;
        reports.finite[block] = all_within(gradient + first, std::min(kBlock, n - first), u.k.scale) ? 1 : 0;
      }
    }
    return {0, n};
  }
  if (reports.gradient_squares != nullptr || reports.update_squares != nullptr || reports.finite != nullptr)
    return run_with_reports(kernels, u, reports);
  const std::size_t skipped = kernels.update_blocks(u, 0, blocks);
  return {n - skipped, skipped};
}

UpdateResult adamw_update(const AdamWParams& params, const std::uint16_t* gradient, const State& from, const State& to,
                          std::size_t n, const BlockReports& reports) {
  return update_with(kernels(), params, gradient, from, to, n, reports);
}

UpdateResult adamw_update(const AdamWParams& params, const std::uint16_t* gradient, const State& state, std::size_t n) {
  return update_with(kernels(), params, gradient, state, state, n, {});
}

void zero_moment(const Moment& moment, std::size_t n, bool is_signed) {
  if (n == 0) return;
  check(moment);
  switch (moment.format) {
    case MomentFormat::block8:
      std::memset(moment.values, is_signed ? kZeroCodeSigned : 0, n);
      std::fill_n(moment.absmax, (n + kBlock - 1) / kBlock, 0.0F);
      return;
    case MomentFormat::f32:
      std::memset(moment.values, 0, 4 * n);
      return;
    case MomentFormat::bf16:
      std::memset(moment.values, 0, 2 * n);
  }
}

void encode_moment(const float* values, const Moment& moment, std::size_t n, bool is_signed) {
  if (n == 0) return;
  check(moment);
  const FloatEnvironment environment;
  for (std::size_t first = 0; first < n; first += kBlock)
    store_moment_block(moment, first / kBlock, std::min(kBlock, n - first), is_signed, values + first);
}

void decode_moment(const Moment& moment, float* values, std::size_t n, bool is_signed) {
  if (n == 0) return;
  check(moment);
  const FloatEnvironment environment;
  for (std::size_t first = 0; first < n; first += kBlock) {
    if (moment.format == MomentFormat::block8 && n - first >= kBlock)
      kernels().decode_block(static_cast<const std::uint8_t*>(moment.values) + first, is_signed,
                             moment.absmax[first / kBlock], values + first);
    else
      load_moment_block(moment, first / kBlock, std::min(kBlock, n - first), is_signed, values + first);
  }
}

bool gradient_norm_squared(const std::uint16_t* gradient, std::size_t n, double* sums) {
  const FloatEnvironment environment;
  bool finite = true;
  for (std::size_t first = 0; first < n; first += kNormSegment)
    finite &= kernels().sum_segment(gradient + first, std::min(kNormSegment, n - first), sums + first / kNormSegment);
  return finite;
}

std::uint16_t bf16_from_float(float value) {
  return narrowed(value);
}
float float_from_bf16(std::uint16_t bits) {
  return widened(bits);
}

}  // namespace tierflow::optim

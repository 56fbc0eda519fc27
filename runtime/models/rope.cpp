#include "runtime/models/rope.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "runtime/base/exception.h"
#include "runtime/models/upload.h"

namespace tierflow::models {

namespace {

// Peng et al., YaRN: pairs that turn often keep their frequency, those that turn rarely are stretched.
at::Tensor yarn(const RopeSpec& rope, const at::Tensor& plain, std::int64_t rotated) {
  const auto dims = static_cast<double>(rotated);
  const auto bound = [&](double turns) {
    return dims * std::log(static_cast<double>(rope.original_max_positions) / (turns * 2 * std::numbers::pi)) /
           (2 * std::log(rope.theta));
  };
  double low = bound(rope.beta_fast), high = bound(rope.beta_slow);
  if (rope.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, dims - 1);
  if (low == high) high += 0.001;
  const at::Tensor stretched = ((at::arange(rotated / 2, at::kFloat) - low) / (high - low)).clamp(0, 1);
  return plain / rope.factor * stretched + plain * (1 - stretched);
}

}  // namespace

at::Tensor inverse_frequencies(const RopeSpec& rope, std::int64_t head_dim, std::int64_t positions) {
  const std::int64_t rotated = rope.rotated(head_dim);
  const at::Tensor exponent = at::arange(0, rotated, 2, at::kLong).to(at::kFloat) / static_cast<double>(rotated);
  const at::Tensor plain = at::reciprocal(at::pow(at::Scalar(rope.theta), exponent));
  if (rope.type == "default") return plain;
  if (rope.type == "linear") return plain / rope.factor;
  if (rope.type == "yarn") return yarn(rope, plain, rotated);
  if (rope.type == "longrope")
    return plain /
           at::tensor(positions > rope.original_max_positions ? rope.long_factors : rope.short_factors, at::kFloat);
  if (rope.type == "llama3") {
    // Wavelengths beyond original/low are stretched by factor, those below original/high kept, those between
    // interpolated.
    const auto original = static_cast<double>(rope.original_max_positions);
    const double longest = original / rope.low_freq_factor, shortest = original / rope.high_freq_factor;
    const at::Tensor wavelength = 2 * std::numbers::pi / plain;
    const at::Tensor stretched = at::where(wavelength > longest, plain / rope.factor, plain);
    const at::Tensor smooth =
        (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor);
    const at::Tensor between = (1 - smooth) * stretched / rope.factor + smooth * stretched;
    return at::where((wavelength < shortest).logical_or(wavelength > longest), stretched, between);
  }
  throw Exception(io::ErrorKind::input, "rope type '" + rope.type + "' is not supported");
}

std::pair<at::Tensor, at::Tensor> rope_tables(const RopeSpec& rope, std::int64_t head_dim, std::int64_t positions,
                                              std::int64_t context, at::Device device) {
  const at::Tensor position = at::arange(positions, at::kLong).to(at::kFloat);
  const at::Tensor angles = upload({at::outer(position, inverse_frequencies(rope, head_dim, context))}, device).front();
  return {angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor};
}

}  // namespace tierflow::models

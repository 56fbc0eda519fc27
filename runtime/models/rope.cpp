#include "runtime/models/rope.h"

#include <ATen/ATen.h>

#include <numbers>

#include "runtime/base/exception.h"

namespace tierflow::models {

at::Tensor inverse_frequencies(const RopeSpec& rope, std::int64_t head_dim) {
  const at::Tensor exponent = at::arange(0, head_dim, 2, at::kLong).to(at::kFloat) / static_cast<double>(head_dim);
  const at::Tensor plain = at::reciprocal(at::pow(at::Scalar(rope.theta), exponent));
  if (rope.type == "default") return plain;
  if (rope.type == "linear") return plain / rope.factor;
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
  throw Exception(io::ErrorKind::input,
                  "rope type '" + rope.type + "' is not supported: use default, linear or llama3");
}

std::pair<at::Tensor, at::Tensor> rope_tables(const RopeSpec& rope, std::int64_t head_dim, std::int64_t positions,
                                              at::Device device) {
  const at::Tensor position = at::arange(positions, at::kLong).to(at::kFloat);
  const at::Tensor angles = at::outer(position, inverse_frequencies(rope, head_dim)).to(device);
  return {angles.cos(), angles.sin()};
}

}  // namespace tierflow::models

// Compiles block_codec.h and step.h for a device: every function that a kernel needs.
#include "optim/step.h"

using namespace tierflow::optim;

template <Rule R>
__global__ void update(const std::uint16_t* gradient, std::uint16_t* hi, std::uint16_t* lo, std::uint8_t* m, std::uint8_t* v, float* absmax,
                       Coefficients k, RoundingKey key) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  const float p = float_of(joined(hi[i], lo[i]));
  const Element e = stepped<R>(k, widened(gradient[i]), {p, decoded<true>(m[i], absmax[0]), decoded<false>(v[i], absmax[1])});
  m[i] = encoded<true>(e.m, inverse_absmax(absmax[2]));
  v[i] = encoded<false>(e.v, inverse_absmax(absmax[3]));
  hi[i] = lo == nullptr ? stochastically_narrowed(e.p, rounding_bits(key, i)) : hi_of(bits_of(e.p));
  if (lo != nullptr) lo[i] = lo_of(bits_of(e.p));
}

template __global__ void update<Rule::adamw>(const std::uint16_t*, std::uint16_t*, std::uint16_t*, std::uint8_t*, std::uint8_t*, float*,
                                             Coefficients, RoundingKey);
template __global__ void update<Rule::adam>(const std::uint16_t*, std::uint16_t*, std::uint16_t*, std::uint8_t*, std::uint8_t*, float*,
                                            Coefficients, RoundingKey);
template __global__ void update<Rule::lion>(const std::uint16_t*, std::uint16_t*, std::uint16_t*, std::uint8_t*, std::uint8_t*, float*,
                                            Coefficients, RoundingKey);
template __global__ void update<Rule::sgd>(const std::uint16_t*, std::uint16_t*, std::uint16_t*, std::uint8_t*, std::uint8_t*, float*,
                                           Coefficients, RoundingKey);

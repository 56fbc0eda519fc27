#pragma once
// Inside optim: what the front door hands to the kernels, and the scalar kernels that define the result.
#include <span>

#include "optim/adamw.h"
#include "optim/step.h"

namespace tierflow::optim {

// One update of whole and partial blocks. Offsets into the state are in elements from the first block of the call.
struct Update {
  Coefficients k;
  Rule rule = Rule::adamw;
  const std::uint16_t* gradient = nullptr;
  State from, to;
  std::size_t n = 0;
  std::uint64_t key = 0, step = 0, first_element = 0;  // of the rounding generator
};

// Magnitudes from here on, infinities and NaNs count as "not finite": m and v then stay far from overflow.
inline constexpr float kLargestGradient = 0x1p60F;

// `largest`: the largest gradient of some, as the bits of a bf16 without its sign. A negative scale counts by its
// magnitude.
TIERFLOW_HD bool within(std::uint32_t largest, float scale) {
  return ::fabsf(widened(static_cast<std::uint16_t>(largest)) * scale) < kLargestGradient;
}
bool all_within(const std::uint16_t* gradient, std::size_t n, float scale);

// The calls that depend on the instruction set. All sets give the same bits.
struct Kernels {
  const char* name;
  // Updates blocks [begin, end) of `u` and returns the number of elements left as they were (copied), because a
  // gradient of their block is not finite.
  std::size_t (*update_blocks)(const Update& u, std::size_t begin, std::size_t end);
  // *sum = sum of squares of count <= kNormSegment elements; false where one is not finite.
  bool (*sum_segment)(const std::uint16_t* gradient, std::size_t count, double* sum);
  // kBlock codes of values times `inverse`, and kBlock values of codes.
  void (*encode_block)(const float* values, bool is_signed, float inverse, std::uint8_t* codes);
  void (*decode_block)(const std::uint8_t* codes, bool is_signed, float absmax, float* values);
};

std::size_t update_blocks_scalar(const Update& u, std::size_t begin, std::size_t end);
bool sum_segment_scalar(const std::uint16_t* gradient, std::size_t count, double* sum);
void encode_block_scalar(const float* values, bool is_signed, float inverse, std::uint8_t* codes);
void decode_block_scalar(const std::uint8_t* codes, bool is_signed, float absmax, float* values);

// All sets that this machine runs, best first; the last is the scalar one.
std::span<const Kernels> all_kernels();
inline const Kernels& kernels() {
  return all_kernels().front();
}

// adamw_update with the given kernels.
UpdateResult update_with(const Kernels& kernels, const AdamWParams& params, const std::uint16_t* gradient,
                         const State& from, const State& to, std::size_t n, const BlockReports& reports = {});

// The update that the arguments describe; std::invalid_argument where they break the contract of adamw_update.
Update digested(const AdamWParams& params, const std::uint16_t* gradient, const State& from, const State& to,
                std::size_t n);

// Copies the state of one block from `u.from` to `u.to`.
void copy_block(const Update& u, std::size_t block);

// `count` elements at `values`; count <= kBlock. `at` is the block's number.
void load_moment_block(const Moment& moment, std::size_t at, std::size_t count, bool is_signed, float* values);
void store_moment_block(const Moment& moment, std::size_t at, std::size_t count, bool is_signed, const float* values);

// Sums of squares: 16 partial sums in double (element i goes to i mod 16), added pairwise: 8 apart, 4, 2, 1.
double pairwise_sum(double* partial);
double sum_of_squares(const float* values, std::size_t count);

// Sets round-to-nearest and subnormal numbers kept, until the end of the scope.
class FloatEnvironment {
 public:
  FloatEnvironment();
  ~FloatEnvironment();
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
  std::uint64_t saved_ = 0;
};

}  // namespace tierflow::optim

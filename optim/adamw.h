#pragma once
// FRONT DOOR of optim: AdamW (Loshchilov and Hutter 2019) and its relatives on host spans. No threads, files or torch;
// the caller cuts the work. Results are the same bits whatever the instruction set, and however the caller cuts at
// multiples of kBlock. (Of a state that is finite, which it stays. Adam's and SGD's decay takes a weight that is not
// into the moments, and there the instruction sets differ.) Every call may run at the same time as others on other
// spans. Inside a call the floating-point environment is round-to-nearest with subnormal numbers kept; the caller's is
// restored. Arguments that break a contract raise std::invalid_argument.
#include <cstddef>
#include <cstdint>
#include <span>

namespace tierflow::optim {

inline constexpr std::size_t kBlock = 256;             // elements that share one absmax
inline constexpr std::size_t kNormSegment = 8 * 1024;  // elements that one partial sum of squares covers

enum class MomentFormat : std::uint8_t { block8 = 1, f32 = 2, bf16 = 3 };
enum class MasterFormat : std::uint8_t {
  split = 1,    // fp32 master as hi (the bf16 weight, (bits + 0x8000) >> 16) and lo (bits & 0xffff)
  bf16_sr = 2,  // hi alone, updated with stochastic rounding
};

// One moment of n elements. block8: `values` has one code (a byte) for each element, and `absmax` one float for each
// block of kBlock elements (the last block may be partial). f32, bf16: `values` has the numbers, and absmax is null.
struct Moment {
  MomentFormat format = MomentFormat::block8;
  void* values = nullptr;
  float* absmax = nullptr;
};

// State of n consecutive elements. Pointers are aligned to 64 bytes (absmax: to 4).
struct State {
  MasterFormat master = MasterFormat::split;
  std::uint16_t* hi = nullptr;
  std::uint16_t* lo = nullptr;  // null for bf16_sr
  Moment m, v;  // v is non-negative: block8 uses the unsigned map. Lion and SGD leave v alone: it may be null
};

enum class Rule : std::uint8_t {
  adamw = 1,  // decoupled decay
  adam = 2,   // weight_decay * p is added to the gradient
  lion = 3,   // Chen et al. 2023; decoupled decay
  sgd = 4,    // heavy ball, m = beta1 m + g, p -= lr m; weight_decay * p is added to the gradient
};

struct AdamWParams {
  float lr = 1e-5F;
  float beta1 = 0.9F, beta2 = 0.999F;
  float eps = 1e-8F;               // at least 2^-100 is used
  float weight_decay = 0.0F;       // decoupled for AdamW and Lion, added to the gradient for Adam and SGD; 0: none
  std::int64_t step = 1;           // 1 for the first update: bias correction
  float gradient_scale = 1.0F;     // applied to each gradient before use: the clip factor
  std::uint64_t rounding_key = 0;  // bf16_sr: keys the generator together with step and element index
  std::uint64_t first_element =
      0;  // bf16_sr: index of element 0 of this call within the keyed tensor, a multiple of kBlock
  Rule rule = Rule::adamw;
  // Adam and AdamW limit |m / (sqrt(v / (1 - beta2^step)) + eps)| to this; m is not bias-corrected here. Infinity: no
  // limit. 0: for 8-bit moments the value that exact Adam never exceeds, for other moments no limit. Without a limit, a
  // v that 8 bits round to zero beside a larger m gives a huge step.
  float update_bound = 0.0F;
  // A block with a gradient that is not finite, or whose scaled magnitude reaches 2^60, is always left as it was. With
  // this flag the whole call then changes nothing: all gradients are checked first.
  bool skip_call_if_not_finite = false;
};

// What a call reports about each block: arrays with one entry for each block, each of which may be null. Sums are in
// double and in a fixed order.
struct BlockReports {
  double* gradient_squares = nullptr;  // of the scaled gradients
  double* update_squares = nullptr;    // of the change of the master; 0 for a block left as it was
  std::uint8_t* finite = nullptr;      // 0 for a block left as it was
};

struct UpdateResult {
  std::size_t updated = 0;  // elements
  std::size_t skipped =
      0;  // elements left as they were: of blocks with gradients that are not finite, or of the whole call
};

// Updates n elements of `state` in place from bf16 gradients (aligned to 64 bytes). n is any length; where it is not a
// multiple of kBlock the last block is partial.
UpdateResult adamw_update(const AdamWParams& params, const std::uint16_t* gradient, const State& state, std::size_t n);

// The same from one set of buffers to another of the same formats: `from` is only read. Buffers are equal or do not
// overlap. Blocks left as they were are copied.
UpdateResult adamw_update(const AdamWParams& params, const std::uint16_t* gradient, const State& from, const State& to,
                          std::size_t n, const BlockReports& reports = {});

// Replays missed updates whose gradients were zero. Gives the same bits as adamw_update() once for each of `updates`,
// in their order, with gradients that are all zero. The state is replayed in parts that stay in the processor's cache.
// A block whose moments are zero and that does not decay is updated only once, because later updates would not change
// it.
void adamw_catch_up(std::span<const AdamWParams> updates, const State& state, std::size_t n);

// The same state from element `first` on, a multiple of kBlock.
State state_from(const State& state, std::size_t first);

// Sets n elements of `moment` to zero, in its format.
void zero_moment(const Moment& moment, std::size_t n, bool is_signed);

// sums has ceil(n / kNormSegment) entries. Sets sums[i] to the sum of squares, in double and in a fixed order, of
// elements [i * kNormSegment, (i+1) * kNormSegment). Returns false if any element is not finite.
bool gradient_norm_squared(const std::uint16_t* gradient, std::size_t n, double* sums);

void split_master(const float* master, std::uint16_t* hi, std::uint16_t* lo, std::size_t n);
void join_master(const std::uint16_t* hi, const std::uint16_t* lo, float* master, std::size_t n);
std::uint16_t bf16_from_float(float value);  // the hi rule, NaN kept NaN
float float_from_bf16(std::uint16_t bits);

// Converts moments from and to fp32, as the update stores and reads them. For block8, `values` must be finite and, for
// v, not negative.
void encode_moment(const float* values, const Moment& moment, std::size_t n, bool is_signed);
void decode_moment(const Moment& moment, float* values, std::size_t n, bool is_signed);

}  // namespace tierflow::optim

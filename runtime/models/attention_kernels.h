#pragma once
// The parts of attention in blocks between its matrix products. bf16 travels as std::uint16_t; `stride` counts elements
// between rows. "Pairs" is how products want their right operand: [rows / 2][columns][2], neighbouring rows side by
// side.
#include <cstdint>

namespace tierflow::models::kernels {

inline constexpr std::int64_t kQueries = 64, kKeys = 128;  // of a block

// Where a block lies in its sequence and which (query, key) of it count: first_seen of the query <= key <= query.
struct BlockPlace {
  std::int64_t first_query, first_key;
  const std::int64_t* first_seen;  // of each query of the block: the first key that it sees, never falling
  std::int64_t queries;
};

// out, pairs of x^T: [dim / 2][width][2] from x [rows, dim]; columns from `rows` to `width` are zero.
void pack_transposed(const std::uint16_t* x, std::int64_t stride, std::int64_t rows, std::int64_t dim,
                     std::uint16_t* out, std::int64_t width);
// out, pairs of x: [width / 2][dim][2] from x [rows, dim]; rows from `rows` to `width` are zero.
void pack(const std::uint16_t* x, std::int64_t stride, std::int64_t rows, std::int64_t dim, std::uint16_t* out,
          std::int64_t width);
// out [dim, width] = x^T, likewise.
void transpose(const std::uint16_t* x, std::int64_t stride, std::int64_t rows, std::int64_t dim, std::uint16_t* out,
               std::int64_t width);

// c [m, n] = a [m, k] b, + c where `add`: bf16 in, fp32 sums in the order of k; b in pairs [k / 2][n][2], c dense. For
// processors that do not multiply bf16 themselves. The same bits on each of them.
void multiply_pairs(std::int64_t m, std::int64_t n, std::int64_t k, const std::uint16_t* a, std::int64_t a_stride,
                    const std::uint16_t* b, float* c, bool add);

// Takes scores [rows, kKeys] into the running softmax: p [rows, kKeys] = exp(scale scores - most), most and total
// [rows] updated, out [rows, dim] rescaled to the new most. Scores that do not count become -infinity.
void softmax_step(float* scores, std::uint16_t* p, float* most, float* total, float* out, std::int64_t rows,
                  std::int64_t dim, float scale, const BlockPlace& place);
// out [rows, dim] = sums / total; lse [rows] = most + log(total).
void softmax_end(const float* sums, const float* most, const float* total, std::uint16_t* out, std::int64_t stride,
                 float* lse, std::int64_t rows, std::int64_t dim);

// delta [rows] = sum of d_out * out along dim.
void row_products(const std::uint16_t* d_out, std::int64_t d_stride, const std::uint16_t* out, std::int64_t stride,
                  float* delta, std::int64_t rows, std::int64_t dim);
// From scores and their probabilities' gradient, both [kKeys, kQueries] with rows up to `keys` filled:
// p = exp(scale scores - lse), d_s = p (d_p - delta) scale, zero where nothing counts, and d_s again in pairs.
void attention_gradient(const float* scores, const float* d_p, const float* lse, const float* delta, std::uint16_t* p,
                        std::uint16_t* d_s, std::uint16_t* d_s_pairs, std::int64_t keys, float scale,
                        const BlockPlace& place);

// Attention of one query to the kept part of its sequence: keys and values [slots, dim] of a head in a ring. The query
// sees `tokens` of them from slot `first` on. Scores and sums in fp32; the softmax is exact, not running.
struct KeptHead {
  const std::uint16_t *keys, *values;
  std::int64_t slots, first, tokens, dim;
};
struct ScoreRule {
  float scale, softcap;  // as in AttentionRules
  const float* sink;     // of the head; null: none
};
// q, out [dim]; scores [tokens] and sums [dim]: scratch.
void attend_one(const std::uint16_t* q, const KeptHead& kept, const ScoreRule& rule, float* scores, float* sums,
                std::uint16_t* out);

// out [rows, dim] = x [rows, dim] rounded.
void round_rows(const float* x, std::uint16_t* out, std::int64_t stride, std::int64_t rows, std::int64_t dim);
// out [rows, dim] = x^T rounded, x [dim, kQueries].
void round_transposed(const float* x, std::uint16_t* out, std::int64_t stride, std::int64_t rows, std::int64_t dim);

}  // namespace tierflow::models::kernels

#include "runtime/models/attention_kernels.h"

#include <algorithm>
#include <cstring>

#include "runtime/models/kernel_math.h"

namespace tierflow::models::kernels {
namespace {

constexpr std::int64_t kVector = 8;
typedef float Floats __attribute__((vector_size(4 * kVector)));
typedef std::uint32_t Words __attribute__((vector_size(4 * kVector)));

// kRows rows of c, as multiply_pairs() has them, from column `column` on: two vectors of them.
template <int kRows>
__attribute__((always_inline)) inline void multiply_columns(std::int64_t column, std::int64_t n, std::int64_t k,
                                                            const std::uint16_t* a, std::int64_t a_stride,
                                                            const std::uint16_t* b, float* c, bool add) {
  Floats sums[kRows][2] = {};
  if (add) {
    for (int row = 0; row < kRows; ++row) std::memcpy(sums[row], c + row * n + column, sizeof(sums[row]));
  }
  for (std::int64_t pair = 0; pair < k / 2; ++pair) {
    Words words[2];
    std::memcpy(words, b + 2 * (pair * n + column), sizeof(words));
    const Floats first[2] = {reinterpret_cast<Floats>(words[0] << 16), reinterpret_cast<Floats>(words[1] << 16)};
    const Floats second[2] = {reinterpret_cast<Floats>(words[0] & 0xffff0000U),
                              reinterpret_cast<Floats>(words[1] & 0xffff0000U)};
    for (int row = 0; row < kRows; ++row) {
      const float x = wide(a[row * a_stride + 2 * pair]), y = wide(a[row * a_stride + 2 * pair + 1]);
      for (int i = 0; i < 2; ++i) {
        sums[row][i] += x * first[i];
        sums[row][i] += y * second[i];
      }
    }
  }
  for (int row = 0; row < kRows; ++row) std::memcpy(c + row * n + column, sums[row], sizeof(sums[row]));
}

template <int kRows>
__attribute__((always_inline)) inline void multiply_rows(std::int64_t n, std::int64_t k, const std::uint16_t* a,
                                                         std::int64_t a_stride, const std::uint16_t* b, float* c,
                                                         bool add) {
  std::int64_t column = 0;
  for (; column + 2 * kVector <= n; column += 2 * kVector)
    multiply_columns<kRows>(column, n, k, a, a_stride, b, c, add);
  for (; column < n; ++column) {
    for (int row = 0; row < kRows; ++row) {
      float sum = add ? c[row * n + column] : 0;
      for (std::int64_t i = 0; i < k; ++i)
        sum += wide(a[row * a_stride + i]) * wide(b[2 * (i / 2 * n + column) + i % 2]);
      c[row * n + column] = sum;
    }
  }
}

}  // namespace

TIERFLOW_CLONES void multiply_pairs(std::int64_t m, std::int64_t n, std::int64_t k, const std::uint16_t* a,
                                    std::int64_t a_stride, const std::uint16_t* b, float* c, bool add) {
  constexpr int kRows = 4;
  std::int64_t row = 0;
  for (; row + kRows <= m; row += kRows) multiply_rows<kRows>(n, k, a + row * a_stride, a_stride, b, c + row * n, add);
  for (; row < m; ++row) multiply_rows<1>(n, k, a + row * a_stride, a_stride, b, c + row * n, add);
}

TIERFLOW_CLONES void pack_transposed(const std::uint16_t* x, std::int64_t stride, std::int64_t rows, std::int64_t dim,
                                     std::uint16_t* out, std::int64_t width) {
  constexpr std::int64_t kTile = 16;
  std::uint32_t tile[kTile][kTile];
  for (std::int64_t r0 = 0; r0 < width; r0 += kTile) {
    for (std::int64_t c0 = 0; c0 < dim / 2; c0 += kTile) {
      const std::int64_t columns = dim / 2 - c0 < kTile ? dim / 2 - c0 : kTile;
      std::memset(tile, 0, sizeof(tile));
      for (std::int64_t r = 0; r < kTile && r0 + r < rows; ++r) {
        std::memcpy(tile[r], x + (r0 + r) * stride + 2 * c0, static_cast<std::size_t>(columns) * 4);
      }
      for (std::int64_t c = 0; c < columns; ++c) {
        std::uint32_t line[kTile];
        for (std::int64_t r = 0; r < kTile; ++r) line[r] = tile[r][c];
        std::memcpy(out + 2 * ((c0 + c) * width + r0), line, sizeof(line));
      }
    }
  }
}

TIERFLOW_CLONES void pack(const std::uint16_t* x, std::int64_t stride, std::int64_t rows, std::int64_t dim,
                          std::uint16_t* out, std::int64_t width) {
  for (std::int64_t r = 0; r < width; r += 2, out += 2 * dim) {
    if (r >= rows) {
      std::memset(out, 0, static_cast<std::size_t>(dim) * 4);
      continue;
    }
    const std::uint16_t* first = x + r * stride;
    const std::uint16_t* second = first + stride;
    if (r + 1 < rows) {
      for (std::int64_t c = 0; c < dim; ++c) {
        out[2 * c] = first[c];
        out[2 * c + 1] = second[c];
      }
    } else {
      for (std::int64_t c = 0; c < dim; ++c) {
        out[2 * c] = first[c];
        out[2 * c + 1] = 0;
      }
    }
  }
}

TIERFLOW_CLONES void transpose(const std::uint16_t* x, std::int64_t stride, std::int64_t rows, std::int64_t dim,
                               std::uint16_t* out, std::int64_t width) {
  for (std::int64_t c = 0; c < dim; ++c) {
    for (std::int64_t r = 0; r < width; ++r) out[c * width + r] = r < rows ? x[r * stride + c] : std::uint16_t{0};
  }
}

TIERFLOW_CLONES void softmax_step(float* scores, std::uint16_t* p, float* most, float* total, float* out,
                                  std::int64_t rows, std::int64_t dim, float scale, const BlockPlace& place) {
  for (std::int64_t i = 0; i < rows; ++i, scores += kKeys, p += kKeys, out += dim) {
    const std::int64_t query = place.first_query + i;
    const std::int64_t begin = place.first_seen[i] - place.first_key, end = query + 1 - place.first_key;
    if (end <= 0 || begin >= kKeys) {
      std::memset(p, 0, kKeys * sizeof(*p));
      continue;
    }
    for (std::int64_t j = 0; j < begin; ++j) scores[j] = -INFINITY;
    for (std::int64_t j = end; j < kKeys; ++j) scores[j] = -INFINITY;
    float lanes[kLanes];
    for (std::int64_t j = 0; j < kLanes; ++j) lanes[j] = scores[j];
    for (std::int64_t j = kLanes; j < kKeys; j += kLanes) {
      for (std::int64_t lane = 0; lane < kLanes; ++lane)
        lanes[lane] = lanes[lane] > scores[j + lane] ? lanes[lane] : scores[j + lane];
    }
    for (std::int64_t width = kLanes / 2; width > 0; width /= 2) {
      for (std::int64_t j = 0; j < width; ++j) lanes[j] = lanes[j] > lanes[j + width] ? lanes[j] : lanes[j + width];
    }
    const float now = lanes[0] * scale > most[i] ? lanes[0] * scale : most[i];
    float sums[kLanes] = {};
    for (std::int64_t j = 0; j < kKeys; j += kLanes) {
      for (std::int64_t lane = 0; lane < kLanes; ++lane) {
        const float e = exp_fast(scores[j + lane] * scale - now);
        p[j + lane] = narrow(e);
        sums[lane] += e;
      }
    }
    const float sum = sum_lanes(kLanes, [&sums](std::int64_t j) { return sums[j]; });
    const float alpha = exp_fast(most[i] - now);
    most[i] = now;
    total[i] = total[i] * alpha + sum;
    if (alpha != 1.0F) {
      for (std::int64_t j = 0; j < dim; ++j) out[j] *= alpha;
    }
  }
}

TIERFLOW_CLONES void softmax_end(const float* sums, const float* most, const float* total, std::uint16_t* out,
                                 std::int64_t stride, float* lse, std::int64_t rows, std::int64_t dim) {
  for (std::int64_t i = 0; i < rows; ++i, sums += dim, out += stride) {
    const float factor = 1.0F / total[i];
    for (std::int64_t j = 0; j < dim; ++j) out[j] = narrow(sums[j] * factor);
    lse[i] = most[i] + std::log(total[i]);
  }
}

TIERFLOW_CLONES void row_products(const std::uint16_t* d_out, std::int64_t d_stride, const std::uint16_t* out,
                                  std::int64_t stride, float* delta, std::int64_t rows, std::int64_t dim) {
  for (std::int64_t i = 0; i < rows; ++i, d_out += d_stride, out += stride) {
    delta[i] = sum_lanes(dim, [=](std::int64_t j) { return wide(d_out[j]) * wide(out[j]); });
  }
}

TIERFLOW_CLONES void attention_gradient(const float* scores, const float* d_p, const float* lse, const float* delta,
                                        std::uint16_t* p, std::uint16_t* d_s, std::uint16_t* d_s_pairs,
                                        std::int64_t keys, float scale, const BlockPlace& place) {
  std::int64_t seeing = 0;  // queries whose first key is not after this row's
  for (std::int64_t row = 0; row < keys; ++row) {
    const float* s = scores + row * kQueries;
    const float* d = d_p + row * kQueries;
    std::uint16_t* p_row = p + row * kQueries;
    std::uint16_t* d_row = d_s + row * kQueries;
    const std::int64_t key = place.first_key + row;
    const auto begin = static_cast<std::int32_t>(std::clamp<std::int64_t>(key - place.first_query, 0, kQueries));
    while (seeing < place.queries && place.first_seen[seeing] <= key) ++seeing;
    const auto end = static_cast<std::int32_t>(seeing);
#pragma GCC ivdep
    for (std::int32_t j = 0; j < kQueries; ++j) {
      const float e = exp_fast(s[j] * scale - lse[j]);
      const float g = e * (d[j] - delta[j]) * scale;
      const bool counts = (j >= begin) & (j < end);
      p_row[j] = counts ? narrow(e) : std::uint16_t{0};
      d_row[j] = counts ? narrow(g) : std::uint16_t{0};
    }
  }
  std::memset(p + keys * kQueries, 0, static_cast<std::size_t>((kKeys - keys) * kQueries) * sizeof(*p));
  std::memset(d_s + keys * kQueries, 0, static_cast<std::size_t>((kKeys - keys) * kQueries) * sizeof(*d_s));
  for (std::int64_t row = 0; row < kKeys; row += 2) {
    const std::uint16_t* first = d_s + row * kQueries;
    const std::uint16_t* second = first + kQueries;
    std::uint16_t* out = d_s_pairs + row * kQueries;
#pragma GCC ivdep
    for (std::int64_t j = 0; j < kQueries; ++j) {
      out[2 * j] = first[j];
      out[2 * j + 1] = second[j];
    }
  }
}

TIERFLOW_CLONES void attend_one(const std::uint16_t* q, const KeptHead& kept, const ScoreRule& rule, float* scores,
                                float* sums, std::uint16_t* out) {
  const std::int64_t dim = kept.dim, whole = kept.slots - kept.first;  // tokens ahead of the ring's end
  for (std::int64_t t = 0; t < kept.tokens; ++t) {
    const std::uint16_t* key = kept.keys + (t < whole ? kept.first + t : t - whole) * dim;
    scores[t] = rule.scale * sum_lanes(dim, [=](std::int64_t j) { return wide(q[j]) * wide(key[j]); });
  }
  if (rule.softcap > 0) {
    for (std::int64_t t = 0; t < kept.tokens; ++t) scores[t] = rule.softcap * std::tanh(scores[t] / rule.softcap);
  }
  float most = rule.sink != nullptr ? *rule.sink : scores[0];
  for (std::int64_t t = 0; t < kept.tokens; ++t) most = scores[t] > most ? scores[t] : most;
  for (std::int64_t t = 0; t < kept.tokens; ++t) scores[t] = exp_fast(scores[t] - most);
  float total = sum_lanes(kept.tokens, [=](std::int64_t t) { return scores[t]; });
  if (rule.sink != nullptr) total += exp_fast(*rule.sink - most);
  std::memset(sums, 0, static_cast<std::size_t>(dim) * sizeof(*sums));
  for (std::int64_t t = 0; t < kept.tokens; ++t) {
    const std::uint16_t* value = kept.values + (t < whole ? kept.first + t : t - whole) * dim;
    const float p = scores[t];
#pragma GCC ivdep
    for (std::int64_t j = 0; j < dim; ++j) sums[j] += p * wide(value[j]);
  }
  const float factor = 1.0F / total;
  for (std::int64_t j = 0; j < dim; ++j) out[j] = narrow(sums[j] * factor);
}

TIERFLOW_CLONES void round_rows(const float* x, std::uint16_t* out, std::int64_t stride, std::int64_t rows,
                                std::int64_t dim) {
  for (std::int64_t i = 0; i < rows; ++i, x += dim, out += stride) {
    for (std::int64_t j = 0; j < dim; ++j) out[j] = narrow(x[j]);
  }
}

TIERFLOW_CLONES void round_transposed(const float* x, std::uint16_t* out, std::int64_t stride, std::int64_t rows,
                                      std::int64_t dim) {
  for (std::int64_t i = 0; i < rows; ++i, out += stride) {
    for (std::int64_t j = 0; j < dim; ++j) out[j] = narrow(x[j * kQueries + i]);
  }
}

}  // namespace tierflow::models::kernels

#pragma once
// The row kernels (kernels.h) by threads that work at the same time: the bodies of the kernels of a CUDA device, with
// the bits of the CPU's. Each thread's share is written here; how threads find what they have in common is the
// caller's, so that a machine without a device tests everything but that:
//
// `Warp`, kLanes threads: each(f) calls f(lane) on every lane, and lanes have seen each other's memory when it returns;
// sum(f) is the sum of f(lane), folded by halves, on every lane.
// `Team`, some warps: each(f) calls f(thread, threads) on every thread; best(f) is the best Candidate f(thread,
// threads) of all; sum_of_stretches(n, f) adds, stretch after stretch in double, what the lanes of one warp make of it:
// f(stretch, lane), folded by halves. Threads have seen each other's memory when such a call returns.
#include <cmath>
#include <cstdint>

#include "runtime/models/kernels.h"
#include "runtime/models/row_math.h"

#ifdef __CUDACC__
#define TIERFLOW_TOGETHER __device__ inline
#define TIERFLOW_UNROLLED _Pragma("unroll 8")
#else
#define TIERFLOW_TOGETHER inline
#define TIERFLOW_UNROLLED
#endif

namespace tierflow::models::kernels {

inline constexpr int kPack = 8;  // words that a thread reads and writes at once, where all lie on 16 bytes
struct alignas(2 * kPack) Pack {
  std::uint16_t at[kPack];
};

TIERFLOW_INLINE bool in_packs(const void* words) {
  return reinterpret_cast<std::uintptr_t>(words) % sizeof(Pack) == 0;
}

// A thread's share of out[i] = f(i, in[i]...), n words. in may be out.
template <class F, class... In>
TIERFLOW_TOGETHER void map_words(std::int64_t thread, std::int64_t threads, std::int64_t n, F f, std::uint16_t* out,
                                 const In*... in) {
  const std::int64_t packs = in_packs(out) && (in_packs(in) && ...) ? n / kPack : 0;
  for (std::int64_t p = thread; p < packs; p += threads) {
    const auto mapped = [&](auto... from) {
      Pack to;
      for (int j = 0; j < kPack; ++j) to.at[j] = f(p * kPack + j, from.at[j]...);
      return to;
    };
    reinterpret_cast<Pack*>(out)[p] = mapped(reinterpret_cast<const Pack*>(in)[p]...);
  }
  for (std::int64_t i = packs * kPack + thread; i < n; i += threads) out[i] = f(i, in[i]...);
}

// A lane's partial sum, as sum_lanes() has it.
template <class Term>
TIERFLOW_TOGETHER float lane_sum(std::int64_t lane, std::int64_t n, Term term) {
  float sum = 0;
  TIERFLOW_UNROLLED
  for (std::int64_t i = lane; i < n; i += kLanes) sum += term(i);
  return sum;
}

// RMSNorm of one row. added and rstd may be null.
template <bool RoundedFirst, class Warp>
TIERFLOW_TOGETHER void rms_norm_row(Warp& warp, const std::uint16_t* x, std::uint16_t* added, const std::uint16_t* w,
                                    std::uint16_t* out, float* rstd, std::int64_t n, float eps, float offset) {
  if (added != nullptr) {
    warp.each([&](int lane) {
      map_words(
          lane, kLanes, n, [](std::int64_t, std::uint16_t a, std::uint16_t b) { return sum_of(a, b); }, added, x,
          added);
    });
    x = added;
  }
  const float squares =
      warp.sum([&](int lane) { return lane_sum(lane, n, [&](std::int64_t i) { return wide(x[i]) * wide(x[i]); }); });
  const float r = rstd_of(squares, n, eps);
  warp.each([&](int lane) {
    map_words(
        lane, kLanes, n,
        [&](std::int64_t, std::uint16_t a, std::uint16_t b) { return normed<RoundedFirst>(a, b, r, offset); }, out, x,
        w);
    if (lane == 0 && rstd != nullptr) *rstd = r;
  });
}

// The gradient of one row's x. residual may be null; d_x may be d_out or residual.
template <class Warp>
TIERFLOW_TOGETHER void rms_norm_row_backward(Warp& warp, const std::uint16_t* d_out, const std::uint16_t* x, float r,
                                             const std::uint16_t* w, const std::uint16_t* residual, std::uint16_t* d_x,
                                             std::int64_t n, float offset) {
  const float dot = warp.sum([&](int lane) {
    return lane_sum(lane, n, [&](std::int64_t i) { return pulled(d_out[i], w[i], x[i], offset); });
  });
  const float pull = pull_of(dot, r, n);
  warp.each([&](int lane) {
    if (residual == nullptr) {
      map_words(
          lane, kLanes, n,
          [&](std::int64_t, std::uint16_t d, std::uint16_t b, std::uint16_t a) {
            return narrow(norm_gradient(d, b, a, r, pull, offset));
          },
          d_x, d_out, w, x);
    } else {
      map_words(
          lane, kLanes, n,
          [&](std::int64_t, std::uint16_t d, std::uint16_t b, std::uint16_t a, std::uint16_t before) {
            return narrow(norm_gradient(d, b, a, r, pull, offset) + wide(before));
          },
          d_x, d_out, w, x, residual);
    }
  });
}

// What `rows` rows add to one column of the weight's gradient. The pointers are to the column in the first row.
template <bool RoundedFirst>
TIERFLOW_TOGETHER float norm_weight_column(const std::uint16_t* d_out, const std::uint16_t* x, const float* rstd,
                                           std::int64_t rows, std::int64_t n) {
  float sum = 0;
  TIERFLOW_UNROLLED
  for (std::int64_t row = 0; row < rows; ++row)
    sum += weight_share<RoundedFirst>(d_out[row * n], x[row * n], rstd[row]);
  return sum;
}

// sum + the sum of partials [blocks, n] of a column, to which both point.
TIERFLOW_TOGETHER float with_partials(float sum, const float* partials, std::int64_t blocks, std::int64_t n) {
  float total = partials[0];
  TIERFLOW_UNROLLED
  for (std::int64_t block = 1; block < blocks; ++block) total += partials[block * n];
  return sum + total;
}

// A thread's share of one row of q [heads, head_dim] and of k [k_heads, head_dim], whose angles' cosines and sines c
// and s are rounded to bf16 first, if `rounded`.
TIERFLOW_TOGETHER void rope_row(int thread, int threads, std::uint16_t* q, std::uint16_t* k, int k_heads,
                                const float* c, const float* s, const RopeShape& shape, bool rounded, float sign) {
  const int half = static_cast<int>(shape.rotated / 2), q_heads = static_cast<int>(shape.heads);
  const int heads = q_heads + k_heads;
  const auto of_head = [&](int head) {
    return head < q_heads ? q + head * shape.head_dim : k + (head - q_heads) * shape.head_dim;
  };
  const auto table = [rounded](float value) { return rounded ? wide(narrow(value)) : value; };
  if (shape.interleaved) {
    for (int at = thread; at < heads * half; at += threads) {
      const int i = at % half;
      std::uint16_t* pair = of_head(at / half) + 2 * i;
      const RotatedPair turned = rotated(pair[0], pair[1], table(c[i]), sign * table(s[i]));
      pair[0] = turned.low;
      pair[1] = turned.high;
    }
    return;
  }
  if (half % kPack != 0 || shape.head_dim % kPack != 0 || !in_packs(q) || !in_packs(k)) {
    for (int at = thread; at < heads * half; at += threads) {
      const int i = at % half;
      std::uint16_t* low = of_head(at / half) + i;
      const RotatedPair turned = rotated(low[0], low[half], table(c[i]), sign * table(s[i]));
      low[0] = turned.low;
      low[half] = turned.high;
    }
    return;
  }
  const int packs = half / kPack;  // of a head's lower half
  for (int at = thread; at < heads * packs; at += threads) {
    const int p = at % packs;
    auto* words = reinterpret_cast<Pack*>(of_head(at / packs));
    Pack low = words[p], high = words[packs + p];
    for (int j = 0; j < kPack; ++j) {
      const int i = p * kPack + j;
      const RotatedPair turned = rotated(low.at[j], high.at[j], table(c[i]), sign * table(s[i]));
      low.at[j] = turned.low;
      high.at[j] = turned.high;
    }
    words[p] = low;
    words[packs + p] = high;
  }
}

template <Gate by>
TIERFLOW_INLINE GatedGradient gated_gradient(std::uint16_t gate, std::uint16_t up, std::uint16_t d_out) {
  return by == Gate::silu ? swiglu_gradient(gate, up, d_out) : geglu_gradient(gate, up, d_out);
}

// A thread's share of n elements.
template <Gate by>
TIERFLOW_TOGETHER void gated_share(std::int64_t thread, std::int64_t threads, const std::uint16_t* gate,
                                   const std::uint16_t* up, std::uint16_t* out, std::int64_t n) {
  map_words(
      thread, threads, n,
      [](std::int64_t, std::uint16_t g, std::uint16_t u) {
        return by == Gate::silu ? swiglu_of(g, u) : geglu_of(g, u);
      },
      out, gate, up);
}
template <Gate by>
TIERFLOW_TOGETHER void gated_share_backward(std::int64_t thread, std::int64_t threads, std::uint16_t* gate,
                                            std::uint16_t* up, std::uint16_t* d_out, std::int64_t n) {
  const std::int64_t packs = in_packs(gate) && in_packs(up) && in_packs(d_out) ? n / kPack : 0;
  for (std::int64_t p = thread; p < packs; p += threads) {
    Pack g = reinterpret_cast<Pack*>(gate)[p], u = reinterpret_cast<Pack*>(up)[p],
         d = reinterpret_cast<Pack*>(d_out)[p];
    for (int j = 0; j < kPack; ++j) {
      const GatedGradient here = gated_gradient<by>(g.at[j], u.at[j], d.at[j]);
      g.at[j] = here.gate;
      u.at[j] = here.up;
      d.at[j] = here.out;
    }
    reinterpret_cast<Pack*>(gate)[p] = g;
    reinterpret_cast<Pack*>(up)[p] = u;
    reinterpret_cast<Pack*>(d_out)[p] = d;
  }
  for (std::int64_t i = packs * kPack + thread; i < n; i += threads) {
    const GatedGradient here = gated_gradient<by>(gate[i], up[i], d_out[i]);
    gate[i] = here.gate;
    up[i] = here.up;
    d_out[i] = here.out;
  }
}

// A logit and its column. The larger logit is better, of equal ones the smaller column.
struct Candidate {
  float value;
  std::int64_t column;
};
TIERFLOW_INLINE bool better(const Candidate& a, const Candidate& b) {
  return a.value > b.value || (a.value == b.value && a.column < b.column);
}

// The largest of a row and its first column; NaNs are passed over. {-infinity, n} of a row without a number above that.
template <class Team>
TIERFLOW_TOGETHER Candidate largest_of_row(Team& team, const std::uint16_t* x, std::int64_t n) {
  return team.best([&](int thread, int threads) {
    Candidate most{-INFINITY, n};
    TIERFLOW_UNROLLED
    for (std::int64_t i = thread; i < n; i += threads) {
      const float value = wide(x[i]);
      if (value > most.value) most = {value, i};
    }
    return most;
  });
}

template <class Team>
TIERFLOW_TOGETHER double exponentials_of_row(Team& team, const std::uint16_t* x, std::int64_t n, float most) {
  return team.sum_of_stretches((n + kStretch - 1) / kStretch, [&](std::int64_t stretch, int lane) {
    const std::uint16_t* from = x + stretch * kStretch;
    const std::int64_t left = n - stretch * kStretch;
    return lane_sum(lane, left < kStretch ? left : kStretch,
                    [&](std::int64_t i) { return exp_fast(wide(from[i]) - most); });
  });
}

template <class Team>
TIERFLOW_TOGETHER void clear_row(Team& team, std::uint16_t* x, std::int64_t n) {
  team.each([&](int thread, int threads) {
    map_words(
        thread, threads, n, [](std::int64_t) { return std::uint16_t{0}; }, x);
  });
}

// The softmax of a row, times a factor.
template <class Team>
TIERFLOW_TOGETHER void shares_of_row(Team& team, std::uint16_t* logits, std::int64_t n, float most, float factor) {
  team.each([&](int thread, int threads) {
    map_words(
        thread, threads, n, [&](std::int64_t, std::uint16_t logit) { return softmax_share(logit, most, factor); },
        logits, logits);
  });
}

// cross_entropy() of one row. A label beyond the vocabulary, of which nobody has said so before, gives a loss of NaN.
template <class Team>
TIERFLOW_TOGETHER void cross_entropy_row(Team& team, std::uint16_t* logits, std::int64_t label, double* loss,
                                         std::int64_t vocab, float scale, bool gradient) {
  if (label < 0) {
    team.each([&](int thread, int) {
      if (thread == 0) *loss = 0;
    });
    if (gradient) clear_row(team, logits, vocab);
    return;
  }
  const std::uint16_t at_label = label < vocab ? logits[label] : std::uint16_t{0x7fc0};
  const float most = largest_of_row(team, logits, vocab).value;
  const double total = exponentials_of_row(team, logits, vocab, most);
  if (gradient) shares_of_row(team, logits, vocab, most, static_cast<float>(static_cast<double>(scale) / total));
  team.each([&](int thread, int) {
    if (thread != 0) return;
    const double own = loss_of(total, most, at_label);
    *loss = own;
    if (gradient && label < vocab) logits[label] = label_gradient(own, scale);
  });
}

// softmax_sums() of one row.
template <class Team>
TIERFLOW_TOGETHER void softmax_sums_row(Team& team, const std::uint16_t* logits, std::int64_t label, double* sums,
                                        std::int64_t first, std::int64_t width) {
  if (label < 0) return;
  const double before = sums[0];
  const auto old = static_cast<float>(before);
  const Candidate here = largest_of_row(team, logits, width);
  const float most = old > here.value ? old : here.value;
  const double added = exponentials_of_row(team, logits, width, most);
  team.each([&](int thread, int) {
    if (thread != 0) return;
    sums[0] = static_cast<double>(most);
    sums[1] = sums[1] * ::exp(before - sums[0]) + added;
    if (here.value > old) sums[3] = static_cast<double>(first + here.column);
    const std::int64_t column = label - first;
    if (column >= 0 && column < width) sums[2] = static_cast<double>(wide(logits[column]));
  });
}

// What softmax_gradient_row() wants, of the complete sums of a row.
TIERFLOW_TOGETHER void softmax_factors_row(const double* sums, std::int64_t label, double scale, double* factors) {
  const double share = label < 0 ? 0.0 * scale : scale;
  factors[0] = sums[0];
  factors[1] = label < 0 ? share : share / sums[1];
  factors[2] = share;
}

// softmax_gradient() of one row.
template <class Team>
TIERFLOW_TOGETHER void softmax_gradient_row(Team& team, std::uint16_t* logits, std::int64_t label,
                                            const double* factors, std::int64_t first, std::int64_t width) {
  if (label < 0) {
    clear_row(team, logits, width);
    return;
  }
  const std::int64_t column = label - first;
  const bool here = column >= 0 && column < width;
  const std::uint16_t at_label = here ? logits[column] : std::uint16_t{0};
  team.each([](int, int) {});  // until all have read it
  shares_of_row(team, logits, width, static_cast<float>(factors[0]), static_cast<float>(factors[1]));
  team.each([&](int thread, int) {
    if (thread == 0 && here) logits[column] = label_gradient(at_label, factors);
  });
}

// top_logits() of one row, from what `values` and `ids` hold to `to_values` and `to_ids`, which are not the same
// memory.
template <class Team>
TIERFLOW_TOGETHER void top_logits_row(Team& team, const std::uint16_t* logits, std::int64_t first, std::int64_t width,
                                      const float* values, const std::int32_t* ids, float* to_values,
                                      std::int32_t* to_ids, std::int64_t wanted) {
  const Candidate none{-INFINITY, INT32_MAX};
  Candidate last{INFINITY, -1};  // better than all
  for (std::int64_t place = 0; place < wanted; ++place) {
    const Candidate next = team.best([&](int thread, int threads) {
      Candidate most = none;
      const auto consider = [&](const Candidate& one) {
        if (better(last, one) && better(one, most)) most = one;
      };
      for (std::int64_t i = thread; i < wanted; i += threads) consider({values[i], ids[i]});
      for (std::int64_t i = thread; i < width; i += threads) consider({wide(logits[i]), first + i});
      return most;
    });
    team.each([&](int thread, int) {
      if (thread != 0) return;
      to_values[place] = next.value;
      to_ids[place] = static_cast<std::int32_t>(next.column);
    });
    last = next;
  }
}

// A thread's share of the columns [0, n) of what the tokens of one id add to its row of `sum`, in the order of the
// tokens. `ids` in rising order, `tokens` the place of each in d [count, n]; this share is that of the id at `place`,
// if that is its first. Ids that are not rows of the sum, [0, rows), are left out.
TIERFLOW_TOGETHER void add_tokens_of_id(std::int64_t thread, std::int64_t threads, float* sum, std::int64_t rows,
                                        const std::uint16_t* d, const std::int64_t* ids, const std::int64_t* tokens,
                                        std::int64_t place, std::int64_t count, std::int64_t n) {
  const std::int64_t id = ids[place];
  if (id < 0 || id >= rows || (place > 0 && ids[place - 1] == id)) return;
  std::int64_t end = count;  // the first place of a larger id
  for (std::int64_t begin = place + 1; begin < end;) {
    const std::int64_t middle = begin + (end - begin) / 2;
    if (ids[middle] == id)
      begin = middle + 1;
    else
      end = middle;
  }
  for (std::int64_t i = thread; i < n; i += threads) {
    float total = sum[id * n + i];
    TIERFLOW_UNROLLED
    for (std::int64_t at = place; at < end; ++at) total += wide(d[tokens[at] * n + i]);
    sum[id * n + i] = total;
  }
}

}  // namespace tierflow::models::kernels

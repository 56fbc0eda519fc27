#include "runtime/models/kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "runtime/models/kernel_math.h"

namespace tierflow::models::kernels {
namespace {

TIERFLOW_INLINE float largest(const std::uint16_t* x, std::int64_t n) {
  float lanes[kLanes];
  for (float& lane : lanes) lane = -INFINITY;
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (std::int64_t j = 0; j < kLanes; ++j) lanes[j] = lanes[j] > wide(x[i + j]) ? lanes[j] : wide(x[i + j]);
  }
  for (std::int64_t j = 0; i < n; ++i, ++j) lanes[j] = lanes[j] > wide(x[i]) ? lanes[j] : wide(x[i]);
  float most = lanes[0];
  for (float lane : lanes) most = most > lane ? most : lane;
  return most;
}

// The first place of `value` among n; n where there is none.
TIERFLOW_INLINE std::int64_t first_of(const std::uint16_t* x, std::int64_t n, float value) {
  std::int64_t i = 0;
  while (i < n && wide(x[i]) != value) ++i;
  return i;
}

// Sum of exp(x - most) over n: stretches in fp32, their sum in double.
TIERFLOW_INLINE double sum_exponentials(const std::uint16_t* x, std::int64_t n, float most) {
  double total = 0;
  for (std::int64_t first = 0; first < n; first += kStretch) {
    const std::uint16_t* stretch = x + first;
    total += sum_lanes(n - first < kStretch ? n - first : kStretch,
                       [stretch, most](std::int64_t i) { return exp_fast(wide(stretch[i]) - most); });
  }
  return total;
}

}  // namespace

TIERFLOW_CLONES void rms_norm(const std::uint16_t* from, std::uint16_t* added, const std::uint16_t* w,
                              std::uint16_t* out, float* rstd, std::int64_t rows, std::int64_t n, float eps,
                              RmsRule rule) {
  for (std::int64_t row = 0; row < rows; ++row, from += n, out += n) {
    const std::uint16_t* x = from;
    if (added != nullptr) {
#pragma GCC ivdep
      for (std::int64_t i = 0; i < n; ++i) added[i] = sum_of(from[i], added[i]);
      x = added;
      added += n;
    }
    const float squares = sum_lanes(n, [x](std::int64_t i) { return wide(x[i]) * wide(x[i]); });
    const float r = rstd_of(squares, n, eps), offset = rule.offset;
    if (rule.rounded_first) {
      for (std::int64_t i = 0; i < n; ++i) out[i] = normed<true>(x[i], w[i], r, offset);
    } else {
      for (std::int64_t i = 0; i < n; ++i) out[i] = normed<false>(x[i], w[i], r, offset);
    }
    if (rstd != nullptr) rstd[row] = r;
  }
}

TIERFLOW_CLONES void rms_norm_backward(const std::uint16_t* d_out, const std::uint16_t* x, const float* rstd,
                                       const std::uint16_t* w, const std::uint16_t* residual, std::uint16_t* d_x,
                                       float* d_w, std::int64_t rows, std::int64_t n, RmsRule rule) {
  const float offset = rule.offset;
  for (std::int64_t row = 0; row < rows; ++row, x += n, d_out += n, d_x += n) {
    const float r = rstd[row];
    const float dot = sum_lanes(n, [=](std::int64_t i) { return pulled(d_out[i], w[i], x[i], offset); });
    const float pull = pull_of(dot, r, n);
    if (d_w != nullptr && rule.rounded_first) {
      for (std::int64_t i = 0; i < n; ++i) d_w[i] += weight_share<true>(d_out[i], x[i], r);
    } else if (d_w != nullptr) {
      for (std::int64_t i = 0; i < n; ++i) d_w[i] += weight_share<false>(d_out[i], x[i], r);
    }
    if (residual != nullptr) {
      for (std::int64_t i = 0; i < n; ++i) {
        d_x[i] = narrow(norm_gradient(d_out[i], w[i], x[i], r, pull, offset) + wide(residual[i]));
      }
      residual += n;
    } else {
      for (std::int64_t i = 0; i < n; ++i) d_x[i] = narrow(norm_gradient(d_out[i], w[i], x[i], r, pull, offset));
    }
  }
}

TIERFLOW_CLONES void layer_norm_sums(const std::uint16_t* d_out, const std::uint16_t* x, const float* mean,
                                     const float* rstd, float* d_w, float* d_b, std::int64_t rows, std::int64_t n) {
  for (std::int64_t row = 0; row < rows; ++row, x += n, d_out += n) {
    const float m = mean[row], r = rstd[row];
    if (d_w != nullptr) {
      for (std::int64_t i = 0; i < n; ++i) d_w[i] += wide(d_out[i]) * ((wide(x[i]) - m) * r);
    }
    if (d_b != nullptr) {
      for (std::int64_t i = 0; i < n; ++i) d_b[i] += wide(d_out[i]);
    }
  }
}

TIERFLOW_CLONES void rope(std::uint16_t* x, const float* cos, const float* sin, const std::int64_t* table_row,
                          std::int64_t first_row, std::int64_t rows, const RopeShape& shape, float sign) {
  const std::int64_t half = shape.rotated / 2;
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t from = table_row != nullptr ? table_row[first_row + row] : (first_row + row) % shape.table_rows;
    const float* c = cos + from * half;
    const float* s = sin + from * half;
    for (std::int64_t head = 0; head < shape.heads; ++head, x += shape.head_dim) {
      if (shape.interleaved) {
        for (std::int64_t i = 0; i < half; ++i) {
          const RotatedPair pair = rotated(x[2 * i], x[2 * i + 1], c[i], sign * s[i]);
          x[2 * i] = pair.low;
          x[2 * i + 1] = pair.high;
        }
        continue;
      }
      std::uint16_t* low = x;
      std::uint16_t* high = x + half;
#pragma GCC ivdep
      for (std::int64_t i = 0; i < half; ++i) {
        const RotatedPair pair = rotated(low[i], high[i], c[i], sign * s[i]);
        low[i] = pair.low;
        high[i] = pair.high;
      }
    }
  }
}

TIERFLOW_CLONES void swiglu(const std::uint16_t* gate, const std::uint16_t* up, std::uint16_t* out, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = swiglu_of(gate[i], up[i]);
}

TIERFLOW_CLONES void swiglu_backward(std::uint16_t* gate, std::uint16_t* up, std::uint16_t* d_out, std::int64_t n) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < n; ++i) {
    const GatedGradient d = swiglu_gradient(gate[i], up[i], d_out[i]);
    gate[i] = d.gate;
    up[i] = d.up;
    d_out[i] = d.out;
  }
}

TIERFLOW_CLONES void cross_entropy(std::uint16_t* logits, const std::int64_t* labels, double* loss, std::int64_t rows,
                                   std::int64_t vocab, float scale, bool gradient) {
  for (std::int64_t row = 0; row < rows; ++row, logits += vocab) {
    const std::int64_t label = labels[row];
    if (label < 0) {
      loss[row] = 0;
      if (gradient) std::memset(logits, 0, static_cast<std::size_t>(vocab) * sizeof(*logits));
      continue;
    }
    const float most = largest(logits, vocab);
    const double total = sum_exponentials(logits, vocab, most);
    loss[row] = loss_of(total, most, logits[label]);
    if (!gradient) continue;
    const float factor = static_cast<float>(static_cast<double>(scale) / total);
    for (std::int64_t i = 0; i < vocab; ++i) logits[i] = softmax_share(logits[i], most, factor);
    logits[label] = label_gradient(loss[row], scale);
  }
}

TIERFLOW_CLONES void softmax_sums(const std::uint16_t* logits, const std::int64_t* labels, double* sums,
                                  std::int64_t rows, std::int64_t first, std::int64_t width) {
  for (std::int64_t row = 0; row < rows; ++row, logits += width, sums += 4) {
    if (labels[row] < 0) continue;
    const double before = sums[0];
    const auto old = static_cast<float>(before);
    const float here = largest(logits, width), most = old > here ? old : here;
    sums[0] = static_cast<double>(most);
    sums[1] = sums[1] * std::exp(before - sums[0]) + sum_exponentials(logits, width, most);
    if (here > old) sums[3] = static_cast<double>(first + first_of(logits, width, here));
    const std::int64_t label = labels[row] - first;
    if (label >= 0 && label < width) sums[2] = static_cast<double>(wide(logits[label]));
  }
}

TIERFLOW_CLONES void softmax_gradient(std::uint16_t* logits, const std::int64_t* labels, const double* factors,
                                      std::int64_t rows, std::int64_t first, std::int64_t width) {
  for (std::int64_t row = 0; row < rows; ++row, logits += width, factors += 3) {
    if (labels[row] < 0) {
      std::memset(logits, 0, static_cast<std::size_t>(width) * sizeof(*logits));
      continue;
    }
    const auto most = static_cast<float>(factors[0]), factor = static_cast<float>(factors[1]);
    const std::int64_t label = labels[row] - first;
    const bool here = label >= 0 && label < width;
    const std::uint16_t at_label = here ? label_gradient(logits[label], factors) : std::uint16_t{0};
    for (std::int64_t i = 0; i < width; ++i) logits[i] = softmax_share(logits[i], most, factor);
    if (here) logits[label] = at_label;
  }
}

void top_logits(const std::uint16_t* logits, std::int64_t first, std::int64_t width, float* values, std::int32_t* ids,
                std::int64_t wanted) {
  struct Entry {
    float value;
    std::int32_t id;
  };
  const auto better = [](const Entry& a, const Entry& b) {
    return a.value > b.value || (a.value == b.value && a.id < b.id);
  };
  std::vector<Entry> heap(static_cast<std::size_t>(wanted));  // the worst on top
  for (std::size_t i = 0; i < heap.size(); ++i) heap[i] = {values[i], ids[i]};
  std::make_heap(heap.begin(), heap.end(), better);
  for (std::int64_t i = 0; i < width; ++i) {
    const Entry here{wide(logits[i]), static_cast<std::int32_t>(first + i)};
    if (!better(here, heap.front())) continue;
    std::pop_heap(heap.begin(), heap.end(), better);
    heap.back() = here;
    std::push_heap(heap.begin(), heap.end(), better);
  }
  std::sort_heap(heap.begin(), heap.end(), better);
  for (std::size_t i = 0; i < heap.size(); ++i) {
    values[i] = heap[i].value;
    ids[i] = heap[i].id;
  }
}

TIERFLOW_CLONES void add_rows_at(float* sum, const std::uint16_t* d, const std::int64_t* ids, std::int64_t tokens,
                                 std::int64_t stride, std::int64_t begin, std::int64_t end) {
  for (std::int64_t t = 0; t < tokens; ++t) {
    float* row = sum + ids[t] * stride;
    for (std::int64_t i = begin; i < end; ++i) row[i] += wide(d[t * stride + i]);
  }
}

TIERFLOW_CLONES void add(float* sum, const float* a, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) sum[i] += a[i];
}

}  // namespace tierflow::models::kernels

// The bodies of the device's row kernels, their threads one after the other on the host: the bits of the CPU's kernels,
// and no byte beyond what is theirs.
#include "runtime/models/row_lanes.h"

#include <gtest/gtest.h>
#include <torch/utils.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

namespace tierflow::testing {
namespace {

namespace kernels = models::kernels;
using kernels::Gate;
using Bits = std::uint16_t;

// Lanes read what others hold before any adds, as a shuffle does.
float folded(std::array<float, kernels::kLanes> sums) {
  for (std::size_t apart = kernels::kLanes / 2; apart > 0; apart /= 2) {
    const auto before = sums;
    for (std::size_t lane = 0; lane + apart < sums.size(); ++lane) sums[lane] += before[lane + apart];
  }
  return sums[0];
}

template <class Partial>
float folded_of(Partial partial) {
  std::array<float, kernels::kLanes> sums{};
  for (int lane = 0; lane < kernels::kLanes; ++lane) sums[static_cast<std::size_t>(lane)] = partial(lane);
  return folded(sums);
}

struct HostWarp {
  template <class Work>
  void each(Work work) {
    for (int lane = kernels::kLanes; lane-- > 0;) work(lane);  // in any order
  }
  template <class Partial>
  float sum(Partial partial) {
    return folded_of(partial);
  }
};

struct HostTeam {
  template <class Work>
  void each(Work work) {
    for (int thread = threads; thread-- > 0;) work(thread, threads);
  }
  template <class Share>
  kernels::Candidate best(Share share) {
    kernels::Candidate most = share(threads - 1, threads);
    for (int thread = threads - 1; thread-- > 0;) {
      const kernels::Candidate here = share(thread, threads);
      if (kernels::better(here, most)) most = here;
    }
    return most;
  }
  template <class Partial>
  double sum_of_stretches(std::int64_t count, Partial partial) {
    double total = 0;
    for (std::int64_t stretch = 0; stretch < count; ++stretch)
      total += folded_of([&](int lane) { return partial(stretch, lane); });
    return total;
  }
  int threads = 64;
};

// Values of a type between guards, from an address that 16 divides, or one element later.
template <class T>
class Guarded {
 public:
  Guarded(std::size_t count, bool shifted) : first_(kGuard + (shifted ? 1 : 0)), count_(count) {
    all_.resize((first_ + count + kGuard) * sizeof(T) / sizeof(Unit) + 1);
    std::ranges::fill(all_, Unit{kPoison, kPoison});
  }
  Guarded(const Guarded&) = default;
  Guarded& operator=(const Guarded&) = default;
  ~Guarded() {
    const auto* bytes = reinterpret_cast<const unsigned char*>(all_.data());
    const std::size_t begin = first_ * sizeof(T), end = begin + count_ * sizeof(T);
    std::size_t written = 0;
    for (std::size_t i = 0; i < all_.size() * sizeof(Unit); ++i)
      if ((i < begin || i >= end) && bytes[i] != (kPoison & 0xffU)) ++written;
    EXPECT_EQ(written, 0) << "bytes beyond what is its own";
  }
  T* data() { return reinterpret_cast<T*>(all_.data()) + first_; }
  T& operator[](std::size_t i) { return data()[i]; }
  std::size_t size() const { return count_; }
  bool operator==(Guarded& other) { return std::memcmp(data(), other.data(), count_ * sizeof(T)) == 0; }

 private:
  struct alignas(16) Unit {
    std::uint64_t low, high;
  };
  static constexpr std::uint64_t kPoison = 0xa5a5a5a5a5a5a5a5U;
  static constexpr std::size_t kGuard = 16;  // elements: a multiple of 16 bytes
  std::size_t first_, count_;
  std::vector<Unit> all_;
};

struct Shape {
  std::int64_t rows, width;
  bool shifted;  // rows do not lie on 16 bytes
};
void PrintTo(const Shape& shape, std::ostream* out) {
  *out << shape.rows << " rows of " << shape.width << (shape.shifted ? ", shifted" : "");
}

class RowLanes : public ::testing::TestWithParam<Shape> {
 protected:
  std::int64_t rows() const { return GetParam().rows; }
  std::int64_t width() const { return GetParam().width; }
  std::size_t words() const { return static_cast<std::size_t>(rows() * width()); }

  template <class T>
  Guarded<T> empty(std::int64_t count) const {
    return {static_cast<std::size_t>(count), GetParam().shifted};
  }
  Guarded<Bits> random(std::int64_t count, float scale = 1.0F) {
    auto values = empty<Bits>(count);
    for (std::int64_t i = 0; i < count; ++i)
      values[static_cast<std::size_t>(i)] = kernels::narrow(scale * normal_(random_));
    return values;
  }
  Guarded<float> random_floats(std::int64_t count) {
    auto values = empty<float>(count);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = normal_(random_);
    return values;
  }
  // Some count nothing, the first row's is the last column.
  Guarded<std::int64_t> labels(std::int64_t most) {
    auto of_rows = empty<std::int64_t>(rows());
    for (std::size_t i = 0; i < of_rows.size(); ++i)
      of_rows[i] = i == 0   ? most - 1
                   : i == 1 ? -100
                            : static_cast<std::int64_t>(random_() % static_cast<unsigned>(most));
    return of_rows;
  }

  std::mt19937 random_{5};
  std::normal_distribution<float> normal_;
};

TEST_P(RowLanes, RmsNorm) {
  for (const kernels::RmsRule rule : {kernels::RmsRule{}, {false, 0}, {false, 1}})
    for (const bool with_residual : {true, false}) {
      const std::int64_t n = width();
      auto x = random(rows() * n), w = random(n), d = random(rows() * n), residual = random(rows() * n);
      auto out = empty<Bits>(rows() * n), lanes_out = empty<Bits>(rows() * n), d_x = empty<Bits>(rows() * n),
           lanes_d_x = empty<Bits>(rows() * n);
      auto rstd = empty<float>(rows()), lanes_rstd = empty<float>(rows());
      auto d_w = random_floats(n), lanes_d_w = d_w;
      kernels::rms_norm(x.data(), nullptr, w.data(), out.data(), rstd.data(), rows(), n, 1e-5F, rule);
      auto partials = empty<float>(n);
      std::fill_n(partials.data(), n, 0.0F);
      Bits* const before = with_residual ? residual.data() : nullptr;
      kernels::rms_norm_backward(d.data(), x.data(), rstd.data(), w.data(), before, d_x.data(), partials.data(), rows(),
                                 n, rule);
      for (std::int64_t i = 0; i < n; ++i) d_w.data()[i] += partials.data()[i];

      HostWarp warp;
      for (std::int64_t row = 0; row < rows(); ++row) {
        const std::int64_t at = row * n;
        const auto norm =
            rule.rounded_first ? kernels::rms_norm_row<true, HostWarp> : kernels::rms_norm_row<false, HostWarp>;
        norm(warp, x.data() + at, nullptr, w.data(), lanes_out.data() + at, lanes_rstd.data() + row, n, 1e-5F,
             rule.offset);
        kernels::rms_norm_row_backward(warp, d.data() + at, x.data() + at, lanes_rstd.data()[row], w.data(),
                                       with_residual ? before + at : nullptr, lanes_d_x.data() + at, n, rule.offset);
      }
      for (std::int64_t i = 0; i < n; ++i) {
        const auto column = rule.rounded_first ? kernels::norm_weight_column<true> : kernels::norm_weight_column<false>;
        const float partial = column(d.data() + i, x.data() + i, lanes_rstd.data(), rows(), n);
        lanes_d_w.data()[i] = kernels::with_partials(lanes_d_w.data()[i], &partial, 1, n);
      }
      EXPECT_TRUE(out == lanes_out);
      EXPECT_TRUE(rstd == lanes_rstd);
      EXPECT_TRUE(d_x == lanes_d_x);
      EXPECT_TRUE(d_w == lanes_d_w);
    }
}

// The sum is torch's, in its place; the norm is that of the sum.
TEST_P(RowLanes, RmsNormOfASum) {
  const std::int64_t n = width();
  auto x = random(rows() * n), added = random(rows() * n), w = random(n), lanes_added = added;
  auto sum = empty<Bits>(rows() * n), expected = sum, out = sum, lanes_out = sum;
  auto rstd = empty<float>(rows()), expected_rstd = rstd, lanes_rstd = rstd;
  const auto words = [](Guarded<Bits>& of) {
    return torch::from_blob(of.data(), {static_cast<std::int64_t>(of.size())}, torch::kBFloat16);
  };
  words(sum).copy_(words(x) + words(added));
  kernels::rms_norm(sum.data(), nullptr, w.data(), expected.data(), expected_rstd.data(), rows(), n, 1e-5F, {});
  kernels::rms_norm(x.data(), added.data(), w.data(), out.data(), rstd.data(), rows(), n, 1e-5F, {});
  HostWarp warp;
  for (std::int64_t row = 0; row < rows(); ++row)
    kernels::rms_norm_row<true>(warp, x.data() + row * n, lanes_added.data() + row * n, w.data(),
                                lanes_out.data() + row * n, lanes_rstd.data() + row, n, 1e-5F, 0.0F);
  for (Guarded<Bits>* of : {&added, &lanes_added}) EXPECT_TRUE(*of == sum);
  for (Guarded<Bits>* of : {&out, &lanes_out}) EXPECT_TRUE(*of == expected);
  for (Guarded<float>* of : {&rstd, &lanes_rstd}) EXPECT_TRUE(*of == expected_rstd);
}

TEST_P(RowLanes, PartialsAddUpInOrder) {
  const std::int64_t n = width(), blocks = 5;
  auto partials = random_floats(blocks * n), sum = random_floats(n), total = empty<float>(n);
  std::copy_n(partials.data(), n, total.data());
  for (std::int64_t block = 1; block < blocks; ++block) kernels::add(total.data(), partials.data() + block * n, n);
  for (std::int64_t i = 0; i < n; ++i)
    EXPECT_EQ(kernels::with_partials(sum.data()[i], partials.data() + i, blocks, n), sum.data()[i] + total.data()[i]);
}

TEST_P(RowLanes, Swiglu) {
  const std::int64_t n = rows() * width();
  auto gate = random(n, 4), up = random(n), d = random(n), out = empty<Bits>(n), lanes_out = empty<Bits>(n);
  auto lanes_gate = gate, lanes_up = up, lanes_d = d;
  kernels::swiglu(gate.data(), up.data(), out.data(), n);
  constexpr std::int64_t kThreads = 7;
  for (std::int64_t thread = 0; thread < kThreads; ++thread)
    kernels::gated_share<Gate::silu>(thread, kThreads, gate.data(), up.data(), lanes_out.data(), n);
  EXPECT_TRUE(out == lanes_out);
  kernels::swiglu_backward(gate.data(), up.data(), d.data(), n);
  for (std::int64_t thread = 0; thread < kThreads; ++thread)
    kernels::gated_share_backward<Gate::silu>(thread, kThreads, lanes_gate.data(), lanes_up.data(), lanes_d.data(), n);
  EXPECT_TRUE(gate == lanes_gate);
  EXPECT_TRUE(up == lanes_up);
  EXPECT_TRUE(d == lanes_d);
}

TEST_P(RowLanes, Geglu) {
  const std::int64_t n = rows() * width();
  auto gate = random(n, 4), up = random(n), d = random(n), out = empty<Bits>(n);
  auto lanes_gate = gate, lanes_up = up, lanes_d = d;
  constexpr std::int64_t kThreads = 7;
  for (std::int64_t thread = 0; thread < kThreads; ++thread)
    kernels::gated_share<Gate::gelu_tanh>(thread, kThreads, gate.data(), up.data(), out.data(), n);
  for (std::int64_t thread = 0; thread < kThreads; ++thread)
    kernels::gated_share_backward<Gate::gelu_tanh>(thread, kThreads, lanes_gate.data(), lanes_up.data(), lanes_d.data(),
                                                   n);
  for (std::size_t i = 0; i < gate.size(); ++i) {
    EXPECT_EQ(out[i], kernels::geglu_of(gate[i], up[i]));
    const kernels::GatedGradient one = kernels::geglu_gradient(gate[i], up[i], d[i]);
    EXPECT_EQ(lanes_gate[i], one.gate);
    EXPECT_EQ(lanes_up[i], one.up);
    EXPECT_EQ(lanes_d[i], one.out);
  }
}

// Every gate in bf16: torch's values in fp64, rounded where its operations in bf16 round.
TEST(Geglu, IsTorchsToTheLastRounding) {
  const torch::Tensor bits = torch::arange(-0x8000, 0x8000, torch::kInt).to(torch::kShort);
  torch::Tensor gates = bits.view(torch::kBFloat16);
  gates = gates.masked_select(gates.abs().le(1e4)).contiguous();
  const auto count = static_cast<std::size_t>(gates.numel());
  torch::manual_seed(3);
  const torch::Tensor ups = torch::randn({gates.numel()}).to(torch::kBFloat16),
                      d_outs = torch::randn({gates.numel()}).to(torch::kBFloat16);
  const auto rounded = [](const torch::Tensor& x) { return x.to(torch::kBFloat16).to(torch::kDouble); };
  const torch::Tensor g = gates.to(torch::kDouble), u = ups.to(torch::kDouble), d = d_outs.to(torch::kDouble);
  const torch::Tensor active = rounded(at::gelu(g, "tanh"));
  const torch::Tensor exact[] = {rounded(active * u), rounded(at::gelu_backward(rounded(d * u), g, "tanh")),
                                 rounded(d * active)};
  torch::Tensor got[3];
  for (torch::Tensor& one : got) one = torch::empty_like(gates);
  const auto words = [](const torch::Tensor& of) { return static_cast<Bits*>(of.data_ptr()); };
  for (std::size_t i = 0; i < count; ++i) {
    const kernels::GatedGradient one = kernels::geglu_gradient(words(gates)[i], words(ups)[i], words(d_outs)[i]);
    EXPECT_EQ(one.out, kernels::geglu_of(words(gates)[i], words(ups)[i]));
    words(got[0])[i] = one.out;
    words(got[1])[i] = one.gate;
    words(got[2])[i] = one.up;
  }
  for (int part = 0; part < 3; ++part) {
    const torch::Tensor here = got[part].to(torch::kDouble), apart = (here - exact[part]).abs();
    // Where a value lies between two of bf16, the other one, which changes what it multiplies too. Below -6 torch's
    // formula takes the difference of two numbers near 1.
    const torch::Tensor allowed = exact[part].abs() * 0x1p-6 + 1e-14;
    EXPECT_TRUE(apart.le(allowed).all().item<bool>()) << part << " by " << (apart / allowed).max().item<double>();
    EXPECT_GT(apart.eq(0).to(torch::kDouble).mean().item<double>(), 0.99) << part;
  }
}

TEST_P(RowLanes, Rope) {
  const std::int64_t half = width() > 128 ? 24 : width(), heads = 3, tables = 2;
  for (const std::int64_t head_dim : {2 * half, 2 * half + 6, 2 * half + 8})
    for (const bool interleaved : {false, true})
      for (const bool rounded : {false, true}) {
        const std::int64_t k_heads = 2;
        auto x = random(rows() * heads * head_dim), k = random(rows() * k_heads * head_dim);
        auto lanes_x = x, lanes_k = k;
        auto cos = random_floats(tables * half), sin = random_floats(tables * half), fine_cos = cos, fine_sin = sin;
        if (rounded)
          for (Guarded<float>* table : {&cos, &sin})
            for (std::size_t i = 0; i < table->size(); ++i) (*table)[i] = kernels::wide(kernels::narrow((*table)[i]));
        const kernels::RopeShape shape{tables, heads, head_dim, 2 * half, interleaved};
        kernels::rope(x.data(), cos.data(), sin.data(), nullptr, 0, rows(), shape, -1.0F);
        kernels::rope(k.data(), cos.data(), sin.data(), nullptr, 0, rows(),
                      {tables, k_heads, head_dim, 2 * half, interleaved}, -1.0F);
        constexpr int kThreads = 5;
        for (std::int64_t row = 0; row < rows(); ++row)
          for (int thread = 0; thread < kThreads; ++thread)
            kernels::rope_row(thread, kThreads, lanes_x.data() + row * heads * head_dim,
                              lanes_k.data() + row * k_heads * head_dim, static_cast<int>(k_heads),
                              fine_cos.data() + row % tables * half, fine_sin.data() + row % tables * half, shape,
                              rounded, -1.0F);
        EXPECT_TRUE(x == lanes_x);
        EXPECT_TRUE(k == lanes_k);
      }
}

TEST_P(RowLanes, CrossEntropy) {
  const std::int64_t n = width();
  for (const bool gradient : {false, true}) {
    auto logits = random(rows() * n, 5), lanes_logits = logits;
    auto label = labels(n);
    auto loss = empty<double>(rows()), lanes_loss = empty<double>(rows());
    kernels::cross_entropy(logits.data(), label.data(), loss.data(), rows(), n, 0.37F, gradient);
    HostTeam team;
    for (std::int64_t row = 0; row < rows(); ++row)
      kernels::cross_entropy_row(team, lanes_logits.data() + row * n, label.data()[row], lanes_loss.data() + row, n,
                                 0.37F, gradient);
    EXPECT_TRUE(loss == lanes_loss);
    EXPECT_TRUE(logits == lanes_logits);
  }
}

// A vocabulary in tiles of unequal width.
TEST_P(RowLanes, SoftmaxInTiles) {
  const std::int64_t n = width(), vocab = n + 3;
  auto label = labels(vocab);
  auto sums = empty<double>(4 * rows());
  for (std::int64_t row = 0; row < rows(); ++row)
    std::ranges::copy(std::array{-std::numeric_limits<double>::infinity(), 0.0, 0.0, -1.0}, sums.data() + 4 * row);
  auto lanes_sums = sums;
  HostTeam team;
  std::vector<Guarded<Bits>> tiles;
  for (const auto& [first, wide] : {std::pair{std::int64_t{0}, n}, {n, std::int64_t{3}}}) {
    tiles.push_back(random(rows() * wide, 2));
    Bits* const logits = tiles.back().data();
    kernels::softmax_sums(logits, label.data(), sums.data(), rows(), first, wide);
    for (std::int64_t row = 0; row < rows(); ++row)
      kernels::softmax_sums_row(team, logits + row * wide, label.data()[row], lanes_sums.data() + 4 * row, first, wide);
    EXPECT_TRUE(sums == lanes_sums);
  }
  auto factors = empty<double>(3 * rows());
  for (std::int64_t row = 0; row < rows(); ++row) {
    double* const of = factors.data() + 3 * row;
    const double* const sum = sums.data() + 4 * row;
    kernels::softmax_factors_row(sum, label.data()[row], 0.37, of);
    EXPECT_EQ(of[0], sum[0]);
    EXPECT_EQ(of[1], label.data()[row] < 0 ? 0.0 : 0.37 / sum[1]);
    EXPECT_EQ(of[2], label.data()[row] < 0 ? 0.0 : 0.37);
  }
  std::int64_t first = 0;
  for (Guarded<Bits>& logits : tiles) {
    const std::int64_t wide = static_cast<std::int64_t>(logits.size()) / rows();
    auto lanes_logits = logits;
    kernels::softmax_gradient(logits.data(), label.data(), factors.data(), rows(), first, wide);
    for (std::int64_t row = 0; row < rows(); ++row)
      kernels::softmax_gradient_row(team, lanes_logits.data() + row * wide, label.data()[row], factors.data() + 3 * row,
                                    first, wide);
    EXPECT_TRUE(logits == lanes_logits);
    first += wide;
  }
}

// More places than logits; equal logits; NaNs and infinities.
TEST_P(RowLanes, TopLogits) {
  const std::int64_t n = width(), wanted = 9;
  auto values = empty<float>(rows() * wanted), lanes_values = values;
  auto ids = empty<std::int32_t>(rows() * wanted), lanes_ids = ids;
  std::fill_n(values.data(), rows() * wanted, -std::numeric_limits<float>::infinity());
  std::fill_n(ids.data(), rows() * wanted, std::numeric_limits<std::int32_t>::max());
  HostTeam team;
  for (const std::int64_t first : {std::int64_t{0}, n}) {
    auto logits = random(rows() * n);
    for (std::size_t i = 0; i < logits.size(); i += 3) logits[i] = kernels::narrow(1.5F);
    if (n > 30) {
      logits[5] = 0x7fc0;
      logits[17] = 0x7f80;
      logits[29] = 0xff80;
    }
    for (std::int64_t row = 0; row < rows(); ++row) {
      const std::int64_t at = row * wanted;
      kernels::top_logits_row(team, logits.data() + row * n, first, n, values.data() + at, ids.data() + at,
                              lanes_values.data() + at, lanes_ids.data() + at, wanted);
      kernels::top_logits(logits.data() + row * n, first, n, values.data() + at, ids.data() + at, wanted);
    }
    EXPECT_TRUE(values == lanes_values);
    EXPECT_TRUE(ids == lanes_ids);
  }
}

// Tokens in their order, whatever their ids; ids beyond the rows are left out.
TEST_P(RowLanes, AddRowsAt) {
  constexpr std::int64_t kVocab = 4, kTokens = 23;
  const std::int64_t n = width();
  auto sum = random_floats(kVocab * n), lanes_sum = sum;
  auto d = random(kTokens * n);
  std::vector<std::int64_t> ids;
  for (std::int64_t i = 0; i < kTokens; ++i) ids.push_back(static_cast<std::int64_t>(random_() % (kVocab + 2)) - 1);
  std::vector<std::int64_t> tokens(ids.size()), sorted;
  std::iota(tokens.begin(), tokens.end(), 0);
  std::ranges::stable_sort(tokens, {}, [&](std::int64_t t) { return ids[static_cast<std::size_t>(t)]; });
  for (const std::int64_t t : tokens) sorted.push_back(ids[static_cast<std::size_t>(t)]);
  for (std::int64_t t = 0; t < kTokens; ++t) {
    const std::int64_t id = ids[static_cast<std::size_t>(t)];
    if (id >= 0 && id < kVocab) kernels::add_rows_at(sum.data(), d.data() + t * n, &id, 1, n, 0, n);
  }
  constexpr std::int64_t kThreads = 3;
  for (std::int64_t place = kTokens; place-- > 0;)
    for (std::int64_t thread = 0; thread < kThreads; ++thread)
      kernels::add_tokens_of_id(thread, kThreads, lanes_sum.data(), kVocab, d.data(), sorted.data(), tokens.data(),
                                place, kTokens, n);
  EXPECT_TRUE(sum == lanes_sum);
}

INSTANTIATE_TEST_SUITE_P(models, RowLanes,
                         ::testing::Values(Shape{3, 1, false}, Shape{3, 8, false}, Shape{4, 31, false},
                                           Shape{4, 33, true}, Shape{5, 64, false}, Shape{3, 100, true},
                                           Shape{3, 4096, false}, Shape{3, 9000, false}, Shape{2, 8200, true}));

// A NaN among the logits shows in the loss; so does a label that there is not.
TEST(RowLanesOfBadValues, ShowInTheLoss) {
  HostTeam team;
  for (const int bad : {0x7fc0, 0x7f80}) {
    std::vector<Bits> logits(64, kernels::narrow(0.5F));
    logits[9] = static_cast<Bits>(bad);
    double loss = 0;
    kernels::cross_entropy_row(team, logits.data(), 3, &loss, 64, 1.0F, true);
    EXPECT_FALSE(std::isfinite(loss));
  }
  std::vector<Bits> logits(64, kernels::narrow(0.5F));
  double loss = 0;
  kernels::cross_entropy_row(team, logits.data(), 64, &loss, 64, 1.0F, true);
  EXPECT_TRUE(std::isnan(loss));
}

}  // namespace
}  // namespace tierflow::testing

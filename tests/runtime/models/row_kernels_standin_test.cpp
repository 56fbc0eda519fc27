// The CUDA source of the row kernels as C++, over a stand-in for CUDA's runtime whose threads speak to each other:
// grids, shuffles and barriers too give the bits of the CPU's kernels, and no word beyond.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "runtime/base/exception.h"
#include "runtime/models/row_kernels_device.h"
#include "runtime/models/row_math.h"
#include "tests/support/cuda/cuda_runtime.h"
#include "tests/support/cuda/standin.h"

namespace tierflow::models {
namespace {

namespace cuda = testing::cuda;
using Bits = std::uint16_t;

constexpr int kDevice = 1;
constexpr std::size_t kBeyond = 64;  // bytes

// Host values and their copy on the device, followed by bytes that nobody may write.
template <class T>
class Mirror {
 public:
  explicit Mirror(std::vector<T> values) : host(std::move(values)) {
    EXPECT_EQ(cudaMalloc(&memory_, bytes() + kBeyond), cudaSuccess);
    std::vector<unsigned char> all(bytes() + kBeyond, 0xa5);
    std::memcpy(all.data(), host.data(), bytes());
    EXPECT_EQ(cudaMemcpyAsync(memory_, all.data(), all.size(), cudaMemcpyHostToDevice, cudaStreamLegacy), cudaSuccess);
  }
  ~Mirror() { EXPECT_EQ(cudaFree(memory_), cudaSuccess); }
  Mirror(const Mirror&) = delete;
  Mirror& operator=(const Mirror&) = delete;

  T* there() { return static_cast<T*>(memory_); }
  // What the device has; equal to the host's, where that is expected.
  std::vector<T> back() {
    std::vector<unsigned char> all(bytes() + kBeyond);
    EXPECT_EQ(cudaMemcpyAsync(all.data(), memory_, all.size(), cudaMemcpyDeviceToHost, cudaStreamLegacy), cudaSuccess);
    for (std::size_t i = bytes(); i < all.size(); ++i) EXPECT_EQ(all[i], 0xa5) << "byte " << i << " beyond";
    std::vector<T> values(host.size());
    std::memcpy(values.data(), all.data(), bytes());
    return values;
  }
  void expect_equal(const char* what) {
    const std::vector<T> there = back();
    EXPECT_EQ(std::memcmp(there.data(), host.data(), bytes()), 0) << what;
  }

  std::vector<T> host;

 private:
  std::size_t bytes() const { return host.size() * sizeof(T); }
  void* memory_ = nullptr;
};

struct Shape {
  std::int64_t rows, n;
};
void PrintTo(const Shape& shape, std::ostream* out) {
  *out << shape.rows << " rows of " << shape.n;
}

class RowKernelsOnStandin : public ::testing::TestWithParam<Shape> {
 protected:
  void SetUp() override {
    cuda::start({.together = true});
    ASSERT_EQ(cudaSetDevice(kDevice), cudaSuccess);
  }
  void TearDown() override { EXPECT_EQ(cuda::finish().faults, std::vector<std::string>()); }

  static std::int64_t rows() { return GetParam().rows; }
  static std::int64_t n() { return GetParam().n; }
  static row_kernels::Queue queue() { return {.device = kDevice, .stream = cudaStreamLegacy}; }

  Mirror<Bits> random(std::int64_t count, float scale = 1.0F) {
    std::vector<Bits> values(static_cast<std::size_t>(count));
    for (Bits& value : values) value = kernels::narrow(scale * normal_(random_));
    return Mirror<Bits>(std::move(values));
  }
  Mirror<float> random_floats(std::int64_t count) {
    std::vector<float> values(static_cast<std::size_t>(count));
    for (float& value : values) value = normal_(random_);
    return Mirror<float>(std::move(values));
  }
  template <class T>
  static Mirror<T> filled(std::int64_t count, T value) {
    return Mirror<T>(std::vector<T>(static_cast<std::size_t>(count), value));
  }
  Mirror<std::int64_t> labels(std::int64_t most) {
    std::vector<std::int64_t> of_rows(static_cast<std::size_t>(rows()));
    for (std::size_t i = 0; i < of_rows.size(); ++i)
      of_rows[i] = i == 1 ? -100 : static_cast<std::int64_t>(random_() % static_cast<unsigned>(most));
    return Mirror<std::int64_t>(std::move(of_rows));
  }

  std::mt19937 random_{5};
  std::normal_distribution<float> normal_;
};

TEST_P(RowKernelsOnStandin, SaysWhatTheCardCan) {
  EXPECT_EQ(models::row_kernels::capability(0), 90);
  EXPECT_EQ(models::row_kernels::capability(99), 0);
}

TEST_P(RowKernelsOnStandin, RmsNorm) {
  for (const kernels::RmsRule rule : {kernels::RmsRule{}, {false, 1}})
    for (const bool with_residual : {true, false}) {
      auto x = random(rows() * n()), w = random(n()), d = random(rows() * n()), residual = random(rows() * n());
      auto out = filled<Bits>(rows() * n(), 1), d_x = filled<Bits>(rows() * n(), 1);
      auto rstd = filled(rows(), 0.0F);
      auto added = random(rows() * n());
      kernels::rms_norm(x.host.data(), added.host.data(), w.host.data(), out.host.data(), rstd.host.data(), rows(), n(),
                        1e-5F, rule);
      row_kernels::rms_norm(x.there(), added.there(), w.there(), out.there(), rstd.there(), rows(), n(), 1e-5F, rule,
                            queue());
      added.expect_equal("x + added");
      out.expect_equal("out of a sum");
      kernels::rms_norm(x.host.data(), nullptr, w.host.data(), out.host.data(), rstd.host.data(), rows(), n(), 1e-5F,
                        rule);
      row_kernels::rms_norm(x.there(), nullptr, w.there(), out.there(), rstd.there(), rows(), n(), 1e-5F, rule,
                            queue());
      out.expect_equal("out");
      rstd.expect_equal("rstd");
      row_kernels::rms_norm(x.there(), nullptr, w.there(), out.there(), nullptr, rows(), n(), 1e-5F, rule, queue());

      const std::int64_t block = 2, blocks = (rows() + block - 1) / block;
      auto partials = filled(blocks * n(), 0.0F), sum = random_floats(n());
      for (std::int64_t b = 0; b < blocks; ++b) {
        const std::int64_t at = b * block * n(), count = std::min(block, rows() - b * block);
        kernels::rms_norm_backward(d.host.data() + at, x.host.data() + at, rstd.host.data() + b * block, w.host.data(),
                                   with_residual ? residual.host.data() + at : nullptr, d_x.host.data() + at,
                                   partials.host.data() + b * n(), count, n(), rule);
      }
      row_kernels::norm_weight_partials(d.there(), x.there(), rstd.there(), partials.there(), rows(), block, n(), rule,
                                        queue());
      partials.expect_equal("partials");
      row_kernels::add_partials(sum.there(), partials.there(), blocks, n(), queue());
      for (std::int64_t b = 1; b < blocks; ++b) kernels::add(partials.host.data(), partials.host.data() + b * n(), n());
      kernels::add(sum.host.data(), partials.host.data(), n());
      sum.expect_equal("sum");
      row_kernels::rms_norm_backward(d.there(), x.there(), rstd.there(), w.there(),
                                     with_residual ? residual.there() : nullptr, d_x.there(), rows(), n(), rule,
                                     queue());
      d_x.expect_equal("d_x");
    }
}

TEST_P(RowKernelsOnStandin, Rope) {
  const std::int64_t half = std::min<std::int64_t>(n(), 64), tables = 3;
  for (const std::int64_t heads : {1, 5})
    for (const bool by_position : {false, true}) {
      const std::int64_t k_heads = 2;
      auto x = random(rows() * heads * 2 * half), k = random(rows() * k_heads * 2 * half);
      auto cos = random_floats(tables * half), sin = random_floats(tables * half);
      std::vector<std::int64_t> of_rows(static_cast<std::size_t>(rows()));
      for (std::int64_t& row : of_rows) row = static_cast<std::int64_t>(random_() % tables);
      Mirror<std::int64_t> positions(std::move(of_rows));
      const kernels::RopeShape shape{tables, heads, 2 * half, 2 * half, false};
      kernels::rope(x.host.data(), cos.host.data(), sin.host.data(), by_position ? positions.host.data() : nullptr, 0,
                    rows(), shape, -1.0F);
      kernels::rope(k.host.data(), cos.host.data(), sin.host.data(), by_position ? positions.host.data() : nullptr, 0,
                    rows(), {tables, k_heads, 2 * half, 2 * half, false}, -1.0F);
      row_kernels::rope(x.there(), k.there(), k_heads, cos.there(), sin.there(),
                        by_position ? positions.there() : nullptr, rows(), shape, false, -1.0F, queue());
      x.expect_equal("q");
      k.expect_equal("k");
      kernels::rope(x.host.data(), cos.host.data(), sin.host.data(), nullptr, 0, rows(), shape, 1.0F);
      row_kernels::rope(x.there(), nullptr, 0, cos.there(), sin.there(), nullptr, rows(), shape, false, 1.0F, queue());
      x.expect_equal("q alone");
    }
}

TEST_P(RowKernelsOnStandin, Swiglu) {
  const std::int64_t all = rows() * n();
  auto gate = random(all, 4), up = random(all), d = random(all), out = filled<Bits>(all, 1);
  kernels::swiglu(gate.host.data(), up.host.data(), out.host.data(), all);
  row_kernels::gated(kernels::Gate::silu, gate.there(), up.there(), out.there(), all, queue());
  out.expect_equal("out");
  kernels::swiglu_backward(gate.host.data(), up.host.data(), d.host.data(), all);
  row_kernels::gated_backward(kernels::Gate::silu, gate.there(), up.there(), d.there(), all, queue());
  gate.expect_equal("gate");
  up.expect_equal("up");
  d.expect_equal("out again");
}

TEST_P(RowKernelsOnStandin, Geglu) {
  const std::int64_t all = rows() * n();
  auto gate = random(all, 4), up = random(all), d = random(all), out = filled<Bits>(all, 1);
  row_kernels::gated(kernels::Gate::gelu_tanh, gate.there(), up.there(), out.there(), all, queue());
  row_kernels::gated_backward(kernels::Gate::gelu_tanh, gate.there(), up.there(), d.there(), all, queue());
  for (std::size_t i = 0; i < gate.host.size(); ++i) {
    out.host[i] = kernels::geglu_of(gate.host[i], up.host[i]);
    const kernels::GatedGradient one = kernels::geglu_gradient(gate.host[i], up.host[i], d.host[i]);
    gate.host[i] = one.gate;
    up.host[i] = one.up;
    d.host[i] = one.out;
  }
  out.expect_equal("out");
  gate.expect_equal("gate");
  up.expect_equal("up");
  d.expect_equal("out again");
}

TEST_P(RowKernelsOnStandin, CrossEntropy) {
  auto logits = random(rows() * n(), 5);
  auto label = labels(n());
  auto loss = filled(rows(), -1.0);
  for (const bool gradient : {false, true}) {
    kernels::cross_entropy(logits.host.data(), label.host.data(), loss.host.data(), rows(), n(), 0.37F, gradient);
    row_kernels::cross_entropy(logits.there(), label.there(), loss.there(), rows(), n(), 0.37F, gradient, queue());
    loss.expect_equal("loss");
    logits.expect_equal("logits");
  }
}

TEST_P(RowKernelsOnStandin, SoftmaxOfTiles) {
  auto label = labels(2 * n());
  std::vector<double> none;
  for (std::int64_t row = 0; row < rows(); ++row)
    none.insert(none.end(), {-std::numeric_limits<double>::infinity(), 0.0, 0.0, -1.0});
  Mirror<double> sums(std::move(none));
  for (const std::int64_t first : {std::int64_t{0}, n()}) {
    auto logits = random(rows() * n(), 2);
    kernels::softmax_sums(logits.host.data(), label.host.data(), sums.host.data(), rows(), first, n());
    row_kernels::softmax_sums(logits.there(), label.there(), sums.there(), rows(), first, n(), queue());
    sums.expect_equal("sums");
  }
  auto factors = filled(3 * rows(), -1.0);
  row_kernels::softmax_factors(sums.there(), label.there(), 0.37, factors.there(), rows(), queue());
  factors.host = factors.back();
  for (std::int64_t row = 0; row < rows(); ++row) {
    const bool counts = label.host[static_cast<std::size_t>(row)] >= 0;
    EXPECT_EQ(factors.host[static_cast<std::size_t>(3 * row)], sums.host[static_cast<std::size_t>(4 * row)]);
    EXPECT_EQ(factors.host[static_cast<std::size_t>(3 * row + 2)], counts ? 0.37 : 0.0);
  }
  auto logits = random(rows() * n(), 2);
  kernels::softmax_gradient(logits.host.data(), label.host.data(), factors.host.data(), rows(), n(), n());
  row_kernels::softmax_gradient(logits.there(), label.there(), factors.there(), rows(), n(), n(), queue());
  logits.expect_equal("gradient");
}

TEST_P(RowKernelsOnStandin, TopLogits) {
  const std::int64_t wanted = 5;
  auto values = filled(rows() * wanted, -std::numeric_limits<float>::infinity()),
       to_values = filled(rows() * wanted, 0.0F);
  auto ids = filled(rows() * wanted, std::numeric_limits<std::int32_t>::max()),
       to_ids = filled(rows() * wanted, std::int32_t{0});
  auto logits = random(rows() * n());
  row_kernels::top_logits(logits.there(), 7, rows(), n(), values.there(), ids.there(), to_values.there(),
                          to_ids.there(), wanted, queue());
  to_values.host = values.host;
  to_ids.host = ids.host;
  for (std::int64_t row = 0; row < rows(); ++row)
    kernels::top_logits(logits.host.data() + row * n(), 7, n(), to_values.host.data() + row * wanted,
                        to_ids.host.data() + row * wanted, wanted);
  to_values.expect_equal("values");
  to_ids.expect_equal("ids");
}

TEST_P(RowKernelsOnStandin, AddRowsAt) {
  constexpr std::int64_t kVocab = 4, kTokens = 11;
  auto sum = random_floats(kVocab * n());
  auto d = random(kTokens * n());
  std::vector<std::int64_t> ids(kTokens), order(kTokens), sorted;
  for (std::int64_t& id : ids) id = static_cast<std::int64_t>(random_() % kVocab);
  std::iota(order.begin(), order.end(), 0);
  const auto id_of = [&](std::int64_t token) { return ids[static_cast<std::size_t>(token)]; };
  std::ranges::stable_sort(order, {}, id_of);
  std::ranges::transform(order, std::back_inserter(sorted), id_of);
  kernels::add_rows_at(sum.host.data(), d.host.data(), ids.data(), kTokens, n(), 0, n());
  Mirror<std::int64_t> rising(std::move(sorted)), tokens(std::move(order));
  row_kernels::add_rows_at(sum.there(), kVocab, d.there(), rising.there(), tokens.there(), kTokens, n(), queue());
  sum.expect_equal("sum");
}

TEST_P(RowKernelsOnStandin, WhatCudaRefusesIsThrown) {
  auto gate = random(8), up = random(8), out = random(8);
  for (std::uint64_t call = 1; call <= 2; ++call) {
    cuda::fail_call_in(call);
    try {
      row_kernels::gated(kernels::Gate::silu, gate.there(), up.there(), out.there(), 8, queue());
      ADD_FAILURE() << "call " << call << " failed and nothing was thrown";
    } catch (const Exception& thrown) {
      EXPECT_EQ(thrown.error().kind, io::ErrorKind::environment);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(models, RowKernelsOnStandin,
                         ::testing::Values(Shape{3, 1}, Shape{9, 31}, Shape{3, 64}, Shape{17, 100}, Shape{3, 4104},
                                           Shape{2, 37000}));

}  // namespace
}  // namespace tierflow::models

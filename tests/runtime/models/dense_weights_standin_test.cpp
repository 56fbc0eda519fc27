// The kernels that widen stored weights on a CUDA device, thread by thread on the host, over the stand-in for its
// runtime: the words of dequantise(), and no word beyond.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "runtime/base/exception.h"
#include "runtime/models/dense_weights_device.h"
#include "tests/runtime/weight_formats.h"
#include "tests/support/cuda/standin.h"

namespace tierflow::models {
namespace {

namespace cuda = testing::cuda;

class DenseOnStandin : public ::testing::TestWithParam<WeightFormat> {
 protected:
  void SetUp() override { cuda::start({.seed = 3, .together = true}); }
  void TearDown() override {
    for (const std::string& fault : cuda::finish().faults) ADD_FAILURE() << "the CUDA runtime: " << fault;
  }
};

constexpr std::size_t kBeyond = 64;  // words

// Stored bytes at random: every code, and scales that are NaN, infinite, subnormal and ordinary.
std::vector<std::byte> random_bytes(WeightFormat format, const WeightLayout& layout) {
  std::vector<std::byte> stored(layout.bytes);
  std::mt19937 random(static_cast<unsigned>(layout.elements));
  for (std::byte& byte : stored) byte = static_cast<std::byte>(random());
  if (format == WeightFormat::mxfp4) return stored;
  for (std::size_t at = (layout.scales + 3) / 4 * 4; at + 4 <= layout.bytes; at += 4)
    if (random() % 4 != 0) {
      const float ordinary = static_cast<float>(random() % 4096) / 512;
      std::memcpy(stored.data() + at, &ordinary, 4);
    }
  return stored;
}

void expect_the_words_of_dequantise(WeightFormat format, const std::vector<std::int64_t>& shape) {
  const WeightLayout layout = weight_layout(format, shape);
  const std::vector<std::byte> stored = random_bytes(format, layout);
  void *from = nullptr, *to = nullptr;
  ASSERT_EQ(cudaMalloc(&from, layout.bytes), cudaSuccess);
  ASSERT_EQ(cudaMalloc(&to, 2 * (layout.elements + kBeyond)), cudaSuccess);
  ASSERT_EQ(cudaMemcpyAsync(from, stored.data(), layout.bytes, cudaMemcpyHostToDevice, cudaStreamLegacy), cudaSuccess);
  dense_on_device(format, layout, static_cast<const std::byte*>(from), static_cast<std::uint16_t*>(to), 0,
                  cudaStreamLegacy);
  std::vector<std::uint16_t> words(layout.elements + kBeyond), expected(layout.elements);
  ASSERT_EQ(cudaMemcpyAsync(words.data(), to, 2 * words.size(), cudaMemcpyDeviceToHost, cudaStreamLegacy), cudaSuccess);
  ASSERT_EQ(cudaFree(from), cudaSuccess);
  ASSERT_EQ(cudaFree(to), cudaSuccess);
  dequantise(format, shape, stored, 0, expected);
  for (std::size_t i = 0; i < expected.size(); ++i) ASSERT_EQ(words[i], expected[i]) << i << " of " << expected.size();
  for (std::size_t i = expected.size(); i < words.size(); ++i) ASSERT_EQ(words[i], 0xffff) << "word " << i << " beyond";
}

// Rows and columns that end within a thread's eight elements, within a tile, a block and a thread block, and after
// them.
TEST_P(DenseOnStandin, EveryShapeHasTheWordsOfDequantise) {
  const WeightFormat format = GetParam();
  std::vector<std::vector<std::int64_t>> shapes;
  if (format == WeightFormat::mxfp4)
    shapes = {{32, 2}, {64, 6}, {32, 250}, {2, 96, 34}, {64, 128}, {96, 2050}};
  else if (format == WeightFormat::fp8 || format == WeightFormat::fp8_rows)
    shapes = {{1, 1}, {3, 5}, {7, 129}, {128, 128}, {130, 257}, {2, 128, 31}, {129, 8}, {1, 4097}};
  else
    shapes = {{1}, {7}, {8}, {9}, {63}, {64}, {65}, {255}, {257}, {2047}, {2048}, {2049}, {33, 71}, {3, 256 * 64 + 5}};
  for (const auto& shape : shapes) {
    SCOPED_TRACE(::testing::PrintToString(shape));
    expect_the_words_of_dequantise(format, shape);
    if (HasFatalFailure()) return;
  }
}

TEST_P(DenseOnStandin, WhatCudaRefusesIsThrown) {
  const std::vector<std::int64_t> shape = {32, 64};
  const WeightLayout layout = weight_layout(GetParam(), shape);
  for (std::uint64_t call = 1; call <= 2; ++call) {
    cuda::start({.failing_call = 2 + call, .together = true});  // after the two below
    void *source = nullptr, *words = nullptr;
    ASSERT_EQ(cudaMalloc(&source, layout.bytes), cudaSuccess);
    ASSERT_EQ(cudaMalloc(&words, 2 * layout.elements), cudaSuccess);
    try {
      dense_on_device(GetParam(), layout, static_cast<const std::byte*>(source), static_cast<std::uint16_t*>(words), 0,
                      cudaStreamLegacy);
      ADD_FAILURE() << "call " << call << " failed and nothing was thrown";
    } catch (const Exception& thrown) {
      EXPECT_EQ(thrown.error().kind, io::ErrorKind::environment);
    }
    cudaFree(source);
    cudaFree(words);
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, DenseOnStandin, testing::every_weight_format(), testing::weight_format_test_name);

}  // namespace
}  // namespace tierflow::models

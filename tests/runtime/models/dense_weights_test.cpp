#include "runtime/models/dense_weights.h"

#include <gtest/gtest.h>
#include <torch/utils.h>

#include "runtime/base/exception.h"
#include "tests/runtime/weight_formats.h"

namespace tierflow::testing {
namespace {

// In a slot that begins 4 bytes before the weight and ends after it.
at::Tensor slot_view(const std::vector<std::byte>& stored) {
  const auto n = static_cast<std::int64_t>(stored.size());
  const at::Tensor slot = torch::full({n + 12}, 0xa5, torch::kByte);
  std::memcpy(slot.data_ptr<std::uint8_t>() + 4, stored.data(), stored.size());
  return slot.narrow(0, 4, n + 4);
}

std::vector<std::byte> made(WeightFormat format, const std::vector<std::int64_t>& shape) {
  torch::manual_seed(7);
  if (is_unconverted(format) || format == WeightFormat::bf16) {
    const WeightLayout at = weight_layout(format, shape);
    std::vector<std::byte> stored(at.bytes);
    const at::Tensor bytes = torch::randint(0, 0x38, {static_cast<std::int64_t>(at.bytes)}, torch::kByte);
    std::memcpy(stored.data(), bytes.data_ptr(), stored.size());
    return stored;
  }
  const at::Tensor values = torch::randn(shape) * 0.02;
  Quantiser quantiser(format, shape);
  quantiser.add({values.data_ptr<float>(), static_cast<std::size_t>(values.numel())});
  return quantiser.finish();
}

// A short one; one that is shared among threads, in pieces that begin within blocks and rows.
std::vector<std::vector<std::int64_t>> shapes(WeightFormat format) {
  if (format == WeightFormat::mxfp4) return {{32, 6}, {544, 322}};
  return {{3, 5}, {517, 321}};
}

class DenseWeights : public ::testing::TestWithParam<WeightFormat> {};
INSTANTIATE_TEST_SUITE_P(Formats, DenseWeights, every_weight_format(), weight_format_test_name);

TEST_P(DenseWeights, AreWhatDequantisingInOnePieceGives) {
  for (const std::vector<std::int64_t>& shape : shapes(GetParam())) {
    const auto stored = made(GetParam(), shape);
    const at::Tensor weight = models::dense(slot_view(stored), GetParam(), shape);
    EXPECT_EQ(weight.sizes(), at::IntArrayRef(shape));
    EXPECT_EQ(weight.scalar_type(), at::kBFloat16);
    std::vector<std::uint16_t> words(static_cast<std::size_t>(weight.numel()));
    dequantise(GetParam(), shape, stored, 0, words);
    EXPECT_EQ(std::memcmp(weight.const_data_ptr(), words.data(), words.size() * 2), 0);
  }
}

TEST_P(DenseWeights, TooFewBytesAreRefused) {
  const std::vector<std::int64_t> shape = shapes(GetParam()).front();
  const auto n = static_cast<std::int64_t>(stored_bytes(GetParam(), shape));
  EXPECT_NO_THROW(models::dense(torch::zeros({n}, torch::kByte), GetParam(), shape));
  EXPECT_THROW(models::dense(torch::zeros({n - 1}, torch::kByte), GetParam(), shape), Exception);
  EXPECT_THROW(models::dense(torch::zeros({n}, torch::kChar), GetParam(), shape), Exception);
  EXPECT_THROW(models::dense(torch::zeros({2 * n}, torch::kByte).slice(0, 0, 2 * n, 2), GetParam(), shape), Exception);
}

}  // namespace
}  // namespace tierflow::testing

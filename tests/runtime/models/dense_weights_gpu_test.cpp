// A GPU gives the bits of the CPU. Skips without one.
#include <gtest/gtest.h>
#include <torch/utils.h>

#include "runtime/device/device_memory.h"
#include "runtime/models/dense_weights.h"
#include "swap/device.h"

namespace tierflow::testing {
namespace {

TEST(DenseWeightsOnGpu, HaveTheBitsOfTheCpu) {
  if (!swap::cuda_available()) GTEST_SKIP() << "no CUDA device here";
  DeviceMemory::cuda();  // loads torch's library
  torch::manual_seed(7);
  for (const auto format : {WeightFormat::bf16, WeightFormat::int8, WeightFormat::nf4, WeightFormat::nf4_double,
                            WeightFormat::fp8, WeightFormat::fp8_rows, WeightFormat::mxfp4})
    for (std::vector<std::int64_t> shape : {std::vector<std::int64_t>{3, 5}, {130, 259}, {1024, 1024}}) {
      if (format == WeightFormat::mxfp4) shape = {shape[0] / 32 * 32 + 32, shape[1] / 2 * 2};
      const WeightLayout at = weight_layout(format, shape);
      // Any codes, with scales of all sizes, infinite and NaN among them.
      at::Tensor stored = torch::randint(0, 256, {static_cast<std::int64_t>(at.bytes) + 8}, torch::kByte);
      stored = stored.narrow(0, 4, stored.numel() - 4);
      const at::Tensor here = models::dense(stored, format, shape);
      const at::Tensor there = models::dense(stored.to(torch::kCUDA), format, shape);
      EXPECT_TRUE(there.is_cuda());
      EXPECT_TRUE(torch::equal(here.view(torch::kShort), there.cpu().view(torch::kShort)))
          << weight_format_name(format) << " " << shape;
    }
}

}  // namespace
}  // namespace tierflow::testing

// Mixtures of experts in a session: routers that overflow.
#include <gtest/gtest.h>

#include <algorithm>

#include "runtime/device/device_memory.h"
#include "runtime/session/session.h"
#include "tests/runtime/session/fixture.h"

namespace tierflow::testing {
namespace {

// So large that the products of the last layer's router are no numbers of the model's type.
WeightSource overflowing() {
  return [](const TensorSpec& tensor, std::uint64_t first, std::span<float> out) {
    initial(11)(tensor, first, out);
    if (tensor.part == Part::router && tensor.shape.size() == 2 && tensor.name.find("layers.1.") != std::string::npos)
      std::ranges::fill(out, 3e38F);
  };
}

class RouterThatOverflows : public ::testing::TestWithParam<const char*> {};

// Scores of infinities are no numbers, wherever the state lies and however the layer is cut.
TEST_P(RouterThatOverflows, IsAStepThatIsSkippedWhole) {
  DeviceMemory::install();
  const Case which = case_called(GetParam());
  const Folder folder;
  for (const bool on_storage : {false, true})
    for (const Tiling& tiling : {Tiling{}, Tiling{.block_elements = 1, .experts = 1}}) {
      const SessionOptions options = on_storage ? streamed(resident(2), folder) : resident(2);
      Session session({make_model(parse_model_spec(which.json, which.name, tiling)), overflowing()}, options);
      const auto before = masters_of(session);
      for (int step = 0; step < 2; ++step) EXPECT_TRUE(session.step(batches(2, step), 1e-2).skipped);
      EXPECT_EQ(session.skipped_steps(), 2U);
      EXPECT_EQ(masters_of(session), before);
    }
}

INSTANTIATE_TEST_SUITE_P(Mixtures, RouterThatOverflows,
                         ::testing::Values("mixtral", "qwen2_moe", "granite_moe", "glm4_moe", "gpt_oss"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace tierflow::testing

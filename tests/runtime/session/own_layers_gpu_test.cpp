// What only a GPU can show of layers of one's own. Skips without one.
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include "swap/device.h"
#include "tests/runtime/session/fixture.h"
#include "tests/runtime/session/small_layers.h"

namespace tierflow::testing {
namespace {

// Buffers stay on the card, and the card's random numbers are the caller's again.
TEST(OneGpu, OwnLayersTrainAfterAnEvaluation) {
  if (!swap::cuda_available()) GTEST_SKIP() << "no CUDA device here";
  SessionOptions options = resident(2), evaluates = options;
  options.device = evaluates.device = "cuda";
  options.device_memory = evaluates.device_memory = 2048 * kMiB;  // the context counts
  evaluates.train = false;
  const Model model = Layers()
                          .add("table", [] { return std::make_shared<Table>(); })
                          .add("middle", [] { return std::make_shared<WithTable>(); })
                          .add("head", [] { return std::make_shared<Loss>(); })
                          .build(9);
  {
    const c10::InferenceMode inference;
    Session(model, evaluates).evaluate(batches(2, 0));
  }
  Session session(model, options, AdamW{.lr = 1e-2});
  const at::Generator of_card = at::globalContext().defaultGenerator(torch::kCUDA);
  const torch::Tensor before = of_card.get_state();
  session.step(batches(2, 0));
  EXPECT_TRUE(torch::equal(of_card.get_state(), before));
}

}  // namespace
}  // namespace tierflow::testing

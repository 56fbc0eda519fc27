// Adapters of experts over a base that streams: the same bits in memory and from storage, over a base in any format,
// and a run that goes on; the folder and the model they are added to.
#include <gtest/gtest.h>

#include "runtime/planning/loading.h"
#include "tests/runtime/session/adapter_steps.h"

namespace tierflow::testing {
namespace {

const AdapterConfig kConfig{.rank = 4, .alpha = 8, .parameters = {"gate_up_proj", "down_proj"}};

Steps trained(const Model& model, SessionOptions options, const std::vector<std::int64_t>& stops = {kSteps}) {
  Steps run;
  for (const std::int64_t up_to : stops) {
    Session session(model, options, {.weight_decay = 0.1});
    const std::vector<std::vector<float>> before = masters_of(session);
    train(session, options, up_to, run);
    std::size_t i = 0;
    for (const UnitSpec& unit : model.spec().units)
      for (const TensorSpec& tensor : unit.tensors) {
        EXPECT_EQ(run.masters[i] == before[i], !tensor.trainable) << tensor.name;
        ++i;
      }
    if (up_to == kSteps) session.discard();
    options.resume = true;
  }
  return run;
}

class SessionExpertAdapters : public ::testing::TestWithParam<Case> {
 protected:
  Model base(const Tiling& tiling = {}) const { return plain_model(GetParam(), tiling); }
  SessionOptions small(const Model& model, bool clipped) const {
    SessionOptions options = resident(2);
    if (!clipped) options.clip.reset();
    options = streamed(options, folder_);
    options.host_memory += loading_bytes(model.spec());
    options.chaos_seed = 7;
    return options;
  }
  void expect_streamed_as_resident(const Model& model, bool clipped) const {
    SessionOptions options = resident(2);
    if (!clipped) options.clip.reset();
    const Steps expected = trained(model, options);
    options = small(model, clipped);
    const Steps found = trained(model, options);
    options.commit_every = 1;
    const Steps stopped = trained(model, options, {2, kSteps});
    EXPECT_EQ(found.losses, expected.losses);
    EXPECT_TRUE(found.masters == expected.masters);
    EXPECT_EQ(stopped.losses, expected.losses);
    EXPECT_TRUE(stopped.masters == expected.masters);
  }

  const Folder folder_;
};

TEST_P(SessionExpertAdapters, StreamedIsResident) {
  for (const bool clipped : {true, false}) expect_streamed_as_resident(with_adapters(base(), kConfig, 5), clipped);
}

// Each stage with some of the experts, and their adapters.
TEST_P(SessionExpertAdapters, InStagesOfSomeExpertsStreamedIsResident) {
  const Model some = base({.block_elements = 1, .experts = 2});
  ASSERT_GT(some.spec().stages.size(), base().spec().stages.size());
  AdapterConfig alone = kConfig;
  alone.parameters_alone = true;
  expect_streamed_as_resident(with_adapters(some, alone, 5), true);
}

TEST_P(SessionExpertAdapters, OverABaseInAnotherFormatStreamedIsResident) {
  for (const WeightFormat format : {WeightFormat::nf4, WeightFormat::int8})
    expect_streamed_as_resident(with_adapters(with_base_format(base(), format), kConfig, 5), true);
}

// What is written is read to the same state; of tiles too.
TEST_P(SessionExpertAdapters, TheFolderHasEachExpertsFactors) {
  const Model some = base({.block_elements = 1, .experts = 2});
  Session session(with_adapters(some, kConfig, 5), resident(2));
  Steps run;
  train(session, resident(2), 2, run);
  session.export_adapter(folder_.path / "adapter");
  Session again(with_adapters(some, folder_.path / "adapter"), resident(2));
  EXPECT_TRUE(masters_of(again) == run.masters);
  Session whole(with_adapters(base(), folder_.path / "adapter"), resident(2));
  EXPECT_NEAR(whole.evaluate(batches(2, 0)).loss, session.evaluate(batches(2, 0)).loss, 1e-3);
}

INSTANTIATE_TEST_SUITE_P(Models, SessionExpertAdapters,
                         ::testing::Values(case_called("mixtral"), case_called("glm4_moe"), case_called("granite_moe"),
                                           case_called("gpt_oss")),
                         case_name);

}  // namespace
}  // namespace tierflow::testing

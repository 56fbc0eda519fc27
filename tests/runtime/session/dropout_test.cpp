// Dropout is for steps: an evaluation, and text that is generated, take all of the model.
#include <gtest/gtest.h>

#include "runtime/device/device_memory.h"
#include "tests/runtime/session/cached_rows.h"

namespace tierflow::testing {
namespace {

struct Found {
  double loss = 0;
  std::vector<float> logits;
  bool operator==(const Found&) const = default;
};

Found found(Session& session, int seed) {
  torch::manual_seed(seed);
  KeyValueCache cache(session.model().spec(), {14});
  const torch::Tensor logits =
      session.next_logits({row(cache, some_tokens(14, 5), {{.length = 14}})}).at(0).contiguous();
  const auto* first = logits.const_data_ptr<float>();
  return {.loss = session.evaluate(batches(2, 7)).loss, .logits = {first, first + logits.numel()}};
}

// Whatever random numbers come. The adapters begin as nothing: a few steps make something of them.
void expect_nothing_dropped(const Model& model) {
  Session session(model, resident(2));
  ASSERT_TRUE(session.model().draws() != models::Draws::nothing);
  for (int step = 0; step < 2; ++step) session.step(batches(2, step), 1e-2);
  EXPECT_EQ(found(session, 1), found(session, 2));
}

TEST(Dropout, IsForStepsAlone) {
  DeviceMemory::install();
  int models = 0;
  for (const Case& which : cases("0.5"))
    for (const Tiling& tiling : {Tiling{}, kTiled}) {
      std::unique_ptr<LayeredModel> model = make_model(parse_model_spec(which.json, which.name, tiling));
      if (model->draws() == models::Draws::nothing) continue;
      SCOPED_TRACE(which.name);
      expect_nothing_dropped({std::move(model), initial(11)});
      ++models;
    }
  EXPECT_GT(models, 8);
}

TEST(Dropout, OfAdaptersIsForStepsAlone) {
  DeviceMemory::install();
  for (const char* name : {"llama", "phi3"})
    for (const Tiling& tiling : {Tiling{}, Tiling{.vocabulary_elements = 32 * 40}}) {
      SCOPED_TRACE(name);
      const Case which = case_called(name);
      const Model base{make_model(parse_model_spec(which.json, which.name, tiling)), initial(11)};
      const std::vector<std::string> projections =
          which.name == "phi3" ? std::vector<std::string>{"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
                               : std::vector<std::string>{"q_proj", "o_proj"};
      for (const std::vector<std::string>& targets : {projections, {"lm_head", "embed_tokens"}})
        expect_nothing_dropped(with_adapters(base, {.rank = 4, .alpha = 8, .dropout = 0.5, .targets = targets}, 5));
    }
}

}  // namespace
}  // namespace tierflow::testing

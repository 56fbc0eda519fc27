// Which stages stand for others when they are measured.
#include "runtime/spec/stage_class.h"

#include <gtest/gtest.h>

#include <functional>

namespace tierflow {
namespace {

ModelSpec model(const std::string& more = "", const Tiling& tiling = {}) {
  return parse_model_spec(
      R"({"architectures": ["MistralForCausalLM"], "vocab_size": 96, "hidden_size": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64)" +
          (more.empty() ? R"(, "intermediate_size": 48, "num_hidden_layers": 3, "sliding_window": null)" : more) + "}",
      "model", tiling);
}

TEST(StageClass, IsOneForAllBlocksOfAModelWhateverItsDepth) {
  const ModelSpec spec = model(),
                  deeper = model(R"(, "intermediate_size": 48, "num_hidden_layers": 7, "sliding_window": null)");
  for (const int stage : {2, 3}) EXPECT_EQ(stage_class(spec, stage), stage_class(spec, 1));
  EXPECT_EQ(stage_class(deeper, 7), stage_class(spec, 1));
  EXPECT_EQ(stage_class(deeper, 8), stage_class(spec, 4));
  EXPECT_EQ(stage_class(deeper, 0), stage_class(spec, 0));
  EXPECT_NE(stage_class(spec, 0), stage_class(spec, 1));
  EXPECT_NE(stage_class(spec, 4), stage_class(spec, 1));
}

TEST(StageClass, DiffersWithShapesWindowsFormatsAndWhatIsTrained) {
  const std::string block = stage_class(model(), 1);
  EXPECT_NE(stage_class(model(R"(, "intermediate_size": 64, "num_hidden_layers": 3, "sliding_window": null)"), 1),
            block);
  EXPECT_NE(stage_class(model(R"(, "intermediate_size": 48, "num_hidden_layers": 3, "sliding_window": 16)"), 1), block);
  ModelSpec spec = model();
  TensorSpec& tensor = spec.units[1].tensors.front();
  const auto differs = [&](const std::function<void(TensorSpec&)>& change) {
    const TensorSpec before = tensor;
    change(tensor);
    EXPECT_NE(stage_class(spec, 1), block);
    EXPECT_EQ(stage_class(spec, 2), block);
    tensor = before;
  };
  differs([](TensorSpec& one) { one.trainable = false; });
  differs([](TensorSpec& one) { one.format = WeightFormat::nf4; });
  differs([](TensorSpec& one) { ++one.shape.front(); });
  differs([](TensorSpec& one) { ++one.shape.back(); });
  EXPECT_EQ(stage_class(spec, 1), block);
}

TEST(StageClass, DiffersWithTheChunkOfALayer) {
  const auto attention = [](const std::string& more) {
    return stage_class(
        parse_model_spec(R"({"architectures": ["Llama4ForCausalLM"], "vocab_size": 96, "hidden_size": 32, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24, "num_hidden_layers": 1)" +
                             more + "}",
                         "model"),
        1);
  };
  EXPECT_NE(attention(R"(, "attention_chunk_size": 8)"), attention(R"(, "attention_chunk_size": 16)"));
  EXPECT_NE(attention(""), attention(R"(, "layer_types": ["full_attention"])"));
}

// The first tile gets hidden states alone.
TEST(StageClass, OfTilesSaysWhatStandsBefore) {
  const ModelSpec spec = model("", {.vocabulary_elements = 32 * 32});
  ASSERT_EQ(spec.stages.size(), 3U + 3 + 4);
  EXPECT_NE(stage_class(spec, 0), stage_class(spec, 1));
  EXPECT_EQ(stage_class(spec, 1), stage_class(spec, 2));
  EXPECT_NE(stage_class(spec, 7), stage_class(spec, 8));
}

}  // namespace
}  // namespace tierflow

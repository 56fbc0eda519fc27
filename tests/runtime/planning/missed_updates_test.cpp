// What a store says of the parts of its embedding, and of the updates that they have missed.
#include "runtime/planning/missed_updates.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/base/exception.h"
#include "runtime/planning/session_plan.h"
#include "tests/optim/fixture.h"

namespace tierflow::testing {
namespace {

TEST(MissedUpdates, AStoreSaysTheSizeOfTheParts) {
  EXPECT_EQ(embedding_part_of(R"({"rows": 8192})"), 8192U);
  EXPECT_EQ(embedding_part_of(R"({"rows": 65536})"), 65536U);
  EXPECT_EQ(embedding_part_of(R"({"rows": true})"), 65536U);  // of stores from before parts had several sizes
  for (const char* other : {"{}", R"({"rows": false})", R"({"rows": 4096})", R"({"rows": 131072})",
                            R"({"rows": -8192})", R"({"rows": "8192"})", "[]", "text"})
    EXPECT_EQ(embedding_part_of(other), 0U) << other;
}

// Two tables, each in a unit of its own with three sparse chunks; the second one's rate is four times the other's, and
// it alone decays.
struct Tables {
  Tables() {
    for (const bool second : {false, true}) {
      spec.units.push_back({.name = second ? "head" : "embedding",
                            .tensors = {{.name = "table",
                                         .shape = {3, static_cast<std::int64_t>(swap::kSparseQuantum)},
                                         .decays = second,
                                         .lr_scale = second ? 4.0 : 1.0}}});
      spec.stages.push_back({.kind = StageKind::block, .units = {second ? 1 : 0}});
    }
    model = pack(spec, Precision::bf16_sr_adam8);
    for (PackedUnit& unit : model.units) {
      unit.shape.groups[0].sparse_elements = swap::kSparseQuantum;
      shapes.push_back(unit.shape);
    }
  }
  ModelSpec spec;
  PackedModel model;
  std::vector<swap::UnitShape> shapes;
  swap::Layout layout() const { return {shapes, model.stages, swap::kChunkQuantum}; }
};

TEST(MissedUpdates, AreReplayedWithTheRateTheDecayAndTheStepOfEach) {
  const Tables tables;
  const swap::Layout layout = tables.layout();
  const SteadyAdamW adamw{.beta1 = 0.8F, .beta2 = 0.95F, .eps = 0.1F, .weight_decay = 0.5F, .seed = 99};
  MissedUpdates missed(layout, adamw, 3);
  for (const float lr : {1e-2F, 3e-2F}) missed.add(lr);
  missed.apply(4);
  missed.add(2e-2F);
  constexpr std::size_t n = swap::kSparseQuantum;
  for (const int id : {1, 4, 5}) {
    const swap::Chunk& chunk = layout.chunks()[id];
    optim::StateArrays s(optim::MasterFormat::bf16_sr, optim::MomentFormat::block8, n);
    optim::fill(s, n, 3);
    optim::Array<std::uint16_t> words(s.hi.begin(), s.hi.begin() + n);
    optim::Array<std::uint8_t> state(chunk.state_bytes, 0);
    const optim::State view =
        state_view({.master = s.master}, n, words.data(), reinterpret_cast<std::byte*>(state.data()));
    for (const auto& [to, from] : {std::pair{view.m, &s.m}, {view.v, &s.v}}) {
      std::copy_n(from->bytes.begin(), n, static_cast<std::uint8_t*>(to.values));
      std::copy_n(from->absmax.begin(), n / optim::kBlock, to.absmax);
    }
    missed.replay(tables.model, chunk, std::as_writable_bytes(std::span(words)),
                  std::as_writable_bytes(std::span(state)), [](std::size_t count, const auto& part) {
                    for (std::size_t i = count; i-- > 0;) part(i);
                  });
    const optim::Array<std::uint16_t> zeros(n, 0);
    const std::vector<float> rates = id == 4 ? std::vector{2e-2F} : std::vector{1e-2F, 3e-2F, 2e-2F};
    ASSERT_EQ(missed.count(id), std::ssize(rates));
    auto step = static_cast<std::int64_t>(7 - rates.size());
    for (const float lr : rates)
      adamw_update({.lr = chunk.unit == 1 ? 4 * lr : lr,
                    .beta1 = 0.8F,
                    .beta2 = 0.95F,
                    .eps = 0.1F,
                    .weight_decay = chunk.unit == 1 ? 0.5F : 0.0F,
                    .step = step++,
                    .rounding_key = rounding_key(99, chunk.unit, 0),
                    .first_element = chunk.first},
                   zeros.data(), s.view(), n);
    EXPECT_TRUE(std::equal(words.begin(), words.end(), s.hi.begin())) << id;
    EXPECT_TRUE(std::equal(s.m.bytes.begin(), s.m.bytes.begin() + n, static_cast<std::uint8_t*>(view.m.values))) << id;
    EXPECT_TRUE(std::equal(s.v.bytes.begin(), s.v.bytes.begin() + n, static_cast<std::uint8_t*>(view.v.values))) << id;
  }
}

TEST(MissedUpdates, ComeBackFromTheirTextAndFromNoOtherText) {
  const Tables tables;
  const swap::Layout layout = tables.layout();
  MissedUpdates missed(layout, {.seed = 99}, 3);
  for (const float lr : {1e-2F, 3e-2F}) missed.add(lr);
  missed.apply(4);
  const MissedUpdates read(layout, 5, missed.json(), "store");
  EXPECT_EQ(read.json(), missed.json());
  EXPECT_EQ(read.adamw(), missed.adamw());
  for (const int id : {0, 3, 4, 5}) EXPECT_EQ(read.count(id), id == 4 ? 0 : 2);

  const auto text = [](const std::string& rates, const std::string& embedding, const std::string& head) {
    return R"({"learning_rates": [)" + rates +
           R"(], "adamw": [0.9, 0.999, 1e-8, 0], "seed": 99, "missed": {"embedding": )" + embedding + R"(, "head": )" +
           head + "}}";
  };
  EXPECT_EQ(MissedUpdates(layout, 5, text("0.1, 0.2", "[[3, 2]]", "[[1, 0], [2, 1]]"), "store").count(5), 1);
  for (const std::string& other :
       {text("0.1, 0.2, 0.3, 0.4, 0.5, 0.6", "[[3, 2]]", "[[3, 2]]"),  // more rates than updates
        text("0.1, 0.2", "[[3, 3]]", "[[3, 2]]"), text("0.1, 0.2", "[[3, -1]]", "[[3, 2]]"),
        text("0.1, 0.2", "[[2, 2]]", "[[3, 2]]"), text("0.1, 0.2", "[[1, 2]]", "[[3, 2]]"),
        text("0.1, 0.2", "[[4, 2]]", "[[2, 2]]"), text("0.1, 0.2", "[[3, 2]]", "[[2, 2]]"),
        text("0.1, 0.2", "[[3, 2]]", "[[4, 2]]"), text("0.1, 0.2", "[[3]]", "[[3, 2]]"),
        text("0.1, 0.2", "7", "[[3, 2]]"), std::string("{}"), std::string("nonsense")}) {
    try {
      const MissedUpdates of_other(layout, 5, other, "store");
      ADD_FAILURE() << other;
    } catch (const Exception& error) {
      EXPECT_EQ(error.error().kind, io::ErrorKind::corruption) << other;
      EXPECT_EQ(error.error().path, "store");
    }
  }
}

std::uint64_t part_of_table(int rows, int columns) {
  const ModelSpec spec = parse_model_spec(
      R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": )" + std::to_string(columns) +
          R"(, "vocab_size": )" + std::to_string(rows) +
          R"(, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 8,
             "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "tie_word_embeddings": false})",
      "config.json", {.vocabulary_elements = INT64_MAX});
  return embedding_part_for(spec, {.storage = {"drive"}, .micro_batch = 1, .micro_batches = 1, .sequence_length = 128});
}

TEST(EmbeddingPart, IsARowWhereThatMakesNotTooMany) {
  EXPECT_EQ(part_of_table(152064, 3584), 8192U);   // 66,528 parts
  EXPECT_EQ(part_of_table(151936, 4096), 16384U);  // 75,968 of 8192
  EXPECT_EQ(part_of_table(32000, 8192), 8192U);
  EXPECT_EQ(part_of_table(32000, 12288), 8192U);
  EXPECT_EQ(part_of_table(32000, 16384), 16384U);
  EXPECT_EQ(part_of_table(128256, 16384), 32768U);
  EXPECT_EQ(part_of_table(1 << 20, 16384), 65536U);
  EXPECT_EQ(part_of_table(4096, 4096), 0U);  // 128 tokens, 128 times 131072 elements
  EXPECT_EQ(part_of_table(4128, 4096), 8192U);
}

}  // namespace
}  // namespace tierflow::testing

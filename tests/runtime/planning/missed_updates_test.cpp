// What a store says of the parts of its embedding, and of the updates that they have missed.
#include "runtime/planning/missed_updates.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "runtime/planning/session_plan.h"

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

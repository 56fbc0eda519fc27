// What a store says of the parts of its embedding, and of the updates that they have missed.
#include "runtime/planning/missed_updates.h"

#include <gtest/gtest.h>

#include "tests/runtime/expect.h"

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

}  // namespace
}  // namespace tierflow::testing

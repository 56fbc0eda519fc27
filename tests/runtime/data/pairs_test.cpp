// Pairs of answers: in every order together, and only where a loss of pairs takes them.
#include <set>

#include "runtime/base/exception.h"
#include "tests/runtime/data/rows_fixture.h"

namespace tierflow::testing {
namespace {

TEST_F(Rows, PairsStayTogetherInEveryOrder) {
  std::vector<Row> rows;
  for (std::uint32_t n = 0; n < 40; ++n) rows.push_back(row(10 + 10 * n, 3 + n % 3));
  rows[6].assign(9, 70);  // nothing to train on within the length: its pair is left out
  rows[6].back() |= T;
  options_.paths = {write("a.tfd", rows, kNotes, true)};
  options_.pairs = Pairs::only;
  options_.held_out = 0.2;
  const Dataset data = prepare("auto");
  EXPECT_TRUE(data.pairs());
  EXPECT_FALSE(data.isolated());
  EXPECT_EQ(data.all_sequences(), 38);
  EXPECT_EQ(data.held_out_sequences(), 8);
  ASSERT_EQ(data.training_sequences(), 30);
  EXPECT_EQ(data.summaries()[0].rows->examples, 20);
  EXPECT_EQ(data.summaries()[0].rows->untrained_when_cut, 1);
  std::set<std::int64_t> seen;
  const auto look = [&](std::int64_t index, bool held_out) {
    const std::int64_t first = sequence(data, index, held_out).ids[0],
                       second = sequence(data, index + 1, held_out).ids[0];
    EXPECT_EQ(first % 20, 10);
    EXPECT_EQ(second, first + 10);
    const auto number = held_out ? &Dataset::number_of_held_out : &Dataset::number_of_training;
    for (const std::int64_t k : {0, 1}) {
      Ids ids(8);
      data.numbered_sequence((data.*number)(index + k), ids);
      EXPECT_EQ(ids[0], first + 10 * k);
    }
    return first;
  };
  for (std::int64_t i = 0; i < 8; i += 2) EXPECT_TRUE(seen.insert(look(i, true)).second);
  std::vector<std::int64_t> orders[2];
  for (std::int64_t i = 0; i < 60; i += 2) orders[i / 30].push_back(look(i, false));
  EXPECT_NE(orders[0], orders[1]);  // each epoch has its own
  for (const std::int64_t first : orders[0]) EXPECT_TRUE(seen.insert(first).second);
  EXPECT_EQ(seen.size(), 19u);
  EXPECT_EQ(std::set(orders[0].begin(), orders[0].end()), std::set(orders[1].begin(), orders[1].end()));
  // Mixed with others they are units too, and only with other pairs.
  options_.paths.push_back(write("b.tfd", {row(801, 4), row(811, 4), row(821, 4), row(831, 4)}, kNotes, true));
  options_.weights = {0.5, 0.5};
  const Dataset mixed = prepare("none");
  for (std::int64_t i = 0; i < mixed.training_sequences(); i += 2) {
    EXPECT_EQ(sequence(mixed, i + 1).ids[0], sequence(mixed, i).ids[0] + 10);
    Ids ids(8);
    mixed.numbered_sequence(mixed.number_of_training(i), ids);
    EXPECT_EQ(ids, sequence(mixed, i).ids);
  }
}

TEST_F(Rows, PairsAreForALossOfPairsAlone) {
  const fs::path pairs = write("a.tfd", {row(10, 4), row(20, 4)}, kNotes, true),
                 plain = write("b.tfd", {row(10, 4), row(20, 4)});
  options_.paths = {pairs};
  EXPECT_THROW(prepare("auto"), Exception);
  options_.pairs = Pairs::either;
  const std::uint64_t fingerprint = prepare("auto").fingerprint();
  EXPECT_THROW(prepare("bfd"), Exception);
  options_.train_on = "all";
  EXPECT_THROW(prepare("auto"), Exception);
  options_.train_on = "assistant";
  options_.paths = {plain};
  EXPECT_NE(prepare("none").fingerprint(), fingerprint);
  options_.pairs = Pairs::only;
  EXPECT_THROW(prepare("auto"), Exception);
  options_.pairs = Pairs::either;
  options_.paths = {pairs, plain};
  options_.weights = {1, 1};
  EXPECT_THROW(prepare("auto"), Exception);
  EXPECT_THROW(RowFile(write("c.tfd", {row(10, 4)}, kNotes, true)), Exception);  // half a pair
}

}  // namespace
}  // namespace tierflow::testing

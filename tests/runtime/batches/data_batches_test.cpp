// Sequences of a dataset as tensors: each row of a micro-batch is one of them, of the kind that was asked for.
#include "runtime/batches/data_batches.h"

#include "tests/runtime/data/rows_fixture.h"

namespace tierflow::testing {
namespace {

class DataBatches : public Rows {
 protected:
  // Eight rows of four tokens, two in a sequence where they are packed.
  Dataset data(const std::string& packing, double held_out = 0) {
    std::vector<Row> rows;
    for (std::uint32_t i = 0; i < 8; ++i) rows.push_back(row(10 * i, 4));
    options_.paths = {write("a.tfd", rows)};
    options_.held_out = held_out;
    return prepare(packing);
  }
  static Ids row_of(const at::Tensor& tensor, std::int64_t row) {
    const auto* first = tensor[row].const_data_ptr<std::int64_t>();
    return {first, first + tensor.size(1)};
  }
};

TEST_F(DataBatches, RowsAreTheSequencesFromTheFirstOn) {
  const Dataset packed = data("bfd");
  const MicroBatch batch = micro_batch(packed, Sequences::training, 1, 3);
  EXPECT_EQ(batch.ids.sizes(), (std::vector<std::int64_t>{3, 8}));
  for (std::int64_t at = 0; at < 3; ++at) {
    const Sequence expected = sequence(packed, 1 + at);
    EXPECT_EQ(row_of(batch.ids, at), expected.ids);
    EXPECT_EQ(row_of(batch.labels, at), expected.labels);
    EXPECT_EQ(row_of(batch.positions, at), expected.positions);
  }
}

TEST_F(DataBatches, PositionsAreThereWhereDocumentsDoNotSeeEachOther) {
  EXPECT_TRUE(micro_batch(data("bfd"), Sequences::training, 0, 1).positions.defined());
  EXPECT_FALSE(micro_batch(data("concat"), Sequences::training, 0, 1).positions.defined());
}

TEST_F(DataBatches, AreOfTheKindAskedFor) {
  const Dataset packed = data("bfd", 0.25);
  ASSERT_EQ(packed.held_out_sequences(), 1);
  EXPECT_EQ(row_of(micro_batch(packed, Sequences::held_out, 0, 1).ids, 0), sequence(packed, 0, true).ids);
  const std::int64_t number = packed.number_of_training(2);
  EXPECT_NE(number, 2);  // the order is shuffled: else these could be mixed up
  EXPECT_EQ(row_of(micro_batch(packed, Sequences::numbered, number, 1).ids, 0), sequence(packed, 2).ids);
}

}  // namespace
}  // namespace tierflow::testing

// Tensors that cross chunks, and chunks that hold several tensors: read, written and exported whole, in memory and from
// storage.
#include "runtime/state/streamed_state.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "optim/adamw.h"
#include "runtime/base/exception.h"
#include "swap/arrange.h"
#include "swap/store.h"
#include "tests/support/temp_dir.h"

namespace tierflow {
namespace {

TensorSpec tensor(std::string name, std::vector<std::int64_t> shape, bool trainable = true) {
  return {.name = std::move(name), .shape = std::move(shape), .trainable = trainable};
}

TensorSpec tile(std::int64_t first_row, std::int64_t rows) {
  return {.name = "table", .shape = {rows, 1000}, .first_row = first_row, .all_rows = 150};
}

// Between 1 and 2, with more bits than bf16 has; another one for each element and `turn`.
float value(const TensorSpec& tensor, std::uint64_t element, std::uint64_t turn = 0) {
  const std::uint64_t mixed =
      (static_cast<std::uint64_t>(tensor.first_element()) + element + 7 * turn + tensor.name.size()) *
      0x9e3779b97f4a7c15;
  return 1 + static_cast<float>(mixed >> 44) * 0x1p-20F;
}

std::vector<float> values_of(const TensorSpec& tensor, std::uint64_t turn = 0) {
  std::vector<float> values(static_cast<std::size_t>(tensor.elements()));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = value(tensor, i, turn);
  return values;
}

std::vector<float> rounded(std::vector<float> values) {
  for (float& value : values) value = optim::float_from_bf16(optim::bf16_from_float(value));
  return values;
}

// bool: most of it is on storage.
class StreamedStateTest : public ::testing::TestWithParam<bool> {
 protected:
  void make(std::vector<UnitSpec> units) {
    spec_.units = std::move(units);
    for (int unit = 0; unit < static_cast<int>(spec_.units.size()); ++unit)
      spec_.stages.push_back({.kind = StageKind::block, .units = {unit}});
    packed_ = pack(spec_, Precision::fp32_master_adam8);
    std::vector<swap::UnitShape> shapes;
    for (const PackedUnit& unit : packed_.units) shapes.push_back(unit.shape);
    layout_ = std::make_unique<swap::Layout>(std::move(shapes), packed_.stages, swap::kChunkQuantum);
    const std::uint64_t least = 2 * layout_->max_word_bytes() + layout_->max_state_bytes() + (16 << 10);
    arrangement_ = value_or_throw(swap::arrange(
        *layout_, {.host_budget = GetParam() ? least : 64 << 20, .device_budget = 64 << 20, .storage = GetParam()}));
    if (GetParam()) {
      EXPECT_LE(std::ranges::count(arrangement_.hi_resident, true), 1);
      store_ = value_or_throw(swap::Store::create(
          {.volume = {.folders = {folder_.path()}, .allow_buffered = true, .allow_any_filesystem = true}}, *layout_));
    }
    state_ = std::make_unique<StreamedState>(spec_.units, packed_, *layout_, arrangement_, store_.get(),
                                             StreamedState::Options{});
    state_->load(
        [](const TensorSpec& tensor, std::uint64_t first, std::span<float> out) {
          for (std::size_t i = 0; i < out.size(); ++i) out[i] = value(tensor, first + i);
        },
        {}, {});
  }

  std::vector<float> master(int unit, int tensor) {
    std::vector<float> values;
    state_->read_master(unit, tensor,
                        [&](std::span<const float> part) { values.insert(values.end(), part.begin(), part.end()); });
    return values;
  }

  // What a chunk's state holds behind the low words of the master. `use` may change it.
  void moments(int chunk, bool writes, const std::function<void(std::span<std::byte>)>& use) {
    const std::uint64_t low = 2 * layout_->chunks()[chunk].elements;
    std::vector<std::byte> all;
    const auto access = [&](bool now, const auto& with) {
      throw_if(state_->executor().access(swap::ExtentKind::state, chunk, now, with));
    };
    access(false, [&](std::span<std::byte> bytes) { all.assign(bytes.begin(), bytes.end()); });
    use(std::span(all).subspan(low));
    if (writes) access(true, [&](std::span<std::byte> bytes) { std::copy(all.begin(), all.end(), bytes.begin()); });
  }

  testing::TempDir folder_;
  ModelSpec spec_;
  PackedModel packed_;
  std::unique_ptr<swap::Layout> layout_;
  swap::Arrangement arrangement_;
  std::unique_ptr<swap::Store> store_;
  std::unique_ptr<StreamedState> state_;  // last: drains before the rest goes
};

TEST_P(StreamedStateTest, WritesOneTensorAcrossItsChunksAndNothingElse) {
  make({{.name = "first",
         .tensors = {tensor("a", {2, 30}), tensor("b", {150, 1000}), tensor("frozen", {70, 1000}, false)}},
        {.name = "second", .tensors = {tensor("d", {70, 1000})}}});
  ASSERT_GE(layout_->trainable_chunks_of(0).size(), 3U);
  for (const swap::Chunk& chunk : layout_->chunks())
    if (chunk.trainable)
      moments(chunk.id, true, [](std::span<std::byte> bytes) { std::ranges::fill(bytes, std::byte{0x5a}); });
  const std::vector<float> b = values_of(spec_.units[0].tensors[1], 1);
  state_->write(0, 1, b.data());
  EXPECT_EQ(master(0, 0), values_of(spec_.units[0].tensors[0]));
  EXPECT_EQ(master(0, 1), b);
  EXPECT_EQ(master(0, 2), rounded(values_of(spec_.units[0].tensors[2])));  // it has no master
  EXPECT_EQ(master(1, 0), values_of(spec_.units[1].tensors[0]));
  for (const swap::Chunk& chunk : layout_->chunks())
    if (chunk.trainable)
      moments(chunk.id, false, [&](std::span<std::byte> bytes) {
        EXPECT_EQ(std::ranges::count(bytes, std::byte{0x5a}), std::ssize(bytes)) << chunk.id;
      });
  const std::vector<float> frozen = values_of(spec_.units[0].tensors[2], 1);
  state_->write(0, 2, frozen.data());
  EXPECT_EQ(master(0, 2), rounded(frozen));
  EXPECT_EQ(master(0, 1), b);
}

// The tiles of a table make one tensor, whatever lies between them.
TEST_P(StreamedStateTest, ExportsATileRightAfterTheTileBefore) {
  make({{.name = "embedding.0", .tensors = {tensor("a", {2, 30}), tile(0, 80)}},
        {.name = "embedding.1", .tensors = {tensor("bb", {2, 30}), tile(80, 70), tensor("unwanted", {4, 30})}},
        {.name = "last", .tensors = {tensor("cccc", {70, 1000})}}});
  const std::vector<TensorHeader> headers = {{.name = "a", .shape = {2, 30}},
                                             {.name = "table", .shape = {150, 1000}},
                                             {.name = "bb", .shape = {2, 30}},
                                             {.name = "cccc", .shape = {70, 1000}}};
  CheckpointWriter writer(folder_.path() / "model", headers);
  std::vector<int> reads(layout_->chunks().size(), 0), announced, done;
  write_weights(
      writer, spec_.units, packed_, *layout_,
      [&](int unit, int tensor) { return spec_.units[unit].tensors[tensor].name != "unwanted"; },
      [&](std::span<const int> chunks, const auto& use) {
        if (announced.empty()) announced.assign(chunks.begin(), chunks.end());
        ++reads[chunks.front()];
        done.push_back(chunks.front());
        state_->read_chunk(chunks.front(), use);
      },
      "exporting", {});
  writer.finish();
  EXPECT_EQ(announced, done);
  const Checkpoint written = Checkpoint::open(folder_.path() / "model");
  for (const TensorHeader& header : headers) {
    const TensorSpec whole = tensor(header.name, header.shape);
    std::vector<float> found(static_cast<std::size_t>(whole.elements()));
    written.read_f32(header.name, 0, found);
    EXPECT_EQ(found, rounded(values_of(whole))) << header.name;
  }
  for (const swap::Chunk& chunk : layout_->chunks()) EXPECT_LE(reads[chunk.id], chunk.unit == 2 ? 1 : 3) << chunk.id;
}

INSTANTIATE_TEST_SUITE_P(Places, StreamedStateTest, ::testing::Bool(),
                         [](const auto& of) { return of.param ? "Storage" : "Memory"; });

}  // namespace
}  // namespace tierflow

// The update of a chunk's tensors, beside one call of the optimizer for each whole tensor.
#include "runtime/state/chunk_work.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/optim/fixture.h"

namespace tierflow {
namespace {

constexpr std::uint64_t kSeed = 77;

class Work final : public ChunkWork {
 public:
  using ChunkWork::ChunkWork;
  using ChunkWork::measure_pieces;
  using ChunkWork::measured;
  using ChunkWork::segments_of;
  using ChunkWork::update_pieces;
  io::Error measure(const swap::Chunk&, std::span<const std::byte>) override { return {}; }
  io::Error update(const swap::Chunk&, std::span<const std::byte>, std::span<std::byte>,
                   std::span<std::byte>) override {
    return {};
  }
};

template <class T>
std::span<std::byte> bytes_of(optim::Array<T>& values) {
  return std::as_writable_bytes(std::span(values));
}

// Two units alike, each with a tensor that crosses chunks between two small ones. Weights begin at 1, moments as
// nonsense.
class ChunkWorkTest : public ::testing::TestWithParam<Precision> {
 protected:
  void SetUp() override {
    for (const char* name : {"first", "second"})
      spec_.units.push_back({.name = name,
                             .tensors = {{.name = "a", .shape = {2, 300}},
                                         {.name = "b", .shape = {150, 1000}},
                                         {.name = "c", .shape = {2, 300}}}});
    for (int unit = 0; unit < 2; ++unit) spec_.stages.push_back({.kind = StageKind::block, .units = {unit}});
    model_ = pack(spec_, GetParam());
    std::vector<swap::UnitShape> shapes;
    for (const PackedUnit& unit : model_.units) shapes.push_back(unit.shape);
    layout_.emplace(std::move(shapes), model_.stages, swap::kChunkQuantum);
    work_.emplace(model_, *layout_, threads_, kSeed);
    for (const swap::Chunk& chunk : layout_->chunks()) {
      words_.emplace_back(chunk.elements, 0x3f80);
      state_.emplace_back(chunk.state_bytes, 0x5a);
      if (GetParam() != Precision::bf16_sr_adam8) std::fill_n(state_.back().begin(), 2 * chunk.elements, 0);  // lo
    }
  }

  // Of all of a tensor in a step; the same for all tensors.
  static optim::Array<std::uint16_t> gradient_of(std::size_t elements, int step) {
    return optim::gradients(elements, static_cast<unsigned>(step));
  }

  optim::Array<std::uint16_t> gradient_of(const swap::Chunk& chunk, int step) const {
    optim::Array<std::uint16_t> gradient(chunk.elements, 0);
    for (const TensorPiece& piece : pieces_of(model_, chunk))
      std::copy_n(gradient_of(piece.tensor->elements, step).begin() + static_cast<std::ptrdiff_t>(piece.in_tensor),
                  piece.elements, gradient.begin() + static_cast<std::ptrdiff_t>(piece.in_chunk));
    return gradient;
  }

  static optim::AdamWParams params_of(int step) { return {.lr = 1e-2F, .weight_decay = 0.1F, .step = step}; }

  // The words of a tensor after some steps of the optimizer alone.
  std::vector<std::uint16_t> expected(int unit, const PackedTensor& tensor, int steps) const {
    const StateFormat& format = model_.units[unit].formats[0];
    optim::StateArrays s(format.master, format.moments, tensor.elements);
    std::ranges::fill(s.hi, 0x3f80);
    for (int step = 1; step <= steps; ++step) {
      optim::AdamWParams params = params_of(step);
      params.rounding_key = rounding_key(kSeed, unit, tensor.tensor);
      adamw_update(params, gradient_of(tensor.elements, step).data(), s.view(), tensor.elements);
    }
    return {s.hi.begin(), s.hi.begin() + static_cast<std::ptrdiff_t>(tensor.elements)};
  }

  std::vector<std::uint16_t> found(int unit, const PackedTensor& tensor) const {
    std::vector<std::uint16_t> all(tensor.elements);
    for (const swap::Chunk& chunk : layout_->chunks())
      for (const TensorPiece& piece : pieces_of(model_, chunk))
        if (chunk.unit == unit && piece.tensor == &tensor)
          std::copy_n(words_[chunk.id].begin() + static_cast<std::ptrdiff_t>(piece.in_chunk), piece.elements,
                      all.begin() + static_cast<std::ptrdiff_t>(piece.in_tensor));
    return all;
  }

  ModelSpec spec_;
  PackedModel model_;
  std::optional<swap::Layout> layout_;
  UpdateThreads threads_{2};
  std::optional<Work> work_;
  std::vector<optim::Array<std::uint16_t>> words_;
  std::vector<optim::Array<std::uint8_t>> state_;
};

// However chunks and threads cut it. The moments begin at zero in the first step, whatever was there.
TEST_P(ChunkWorkTest, UpdatesEachTensorAsOneCallWould) {
  ASSERT_GT(layout_->chunks_of(0).size(), 2U);
  for (int step = 1; step <= 2; ++step)
    for (const swap::Chunk& chunk : layout_->chunks()) {
      auto gradient = gradient_of(chunk, step);
      EXPECT_EQ(work_->update_pieces(chunk, bytes_of(gradient), bytes_of(words_[chunk.id]), bytes_of(state_[chunk.id]),
                                     [&](const TensorPiece&) { return params_of(step); }),
                parameters_in(model_, chunk));
    }
  for (int unit = 0; unit < 2; ++unit)
    for (const PackedTensor& tensor : model_.units[unit].tensors)
      EXPECT_EQ(found(unit, tensor), expected(unit, tensor, 2)) << unit << " " << tensor.tensor;
}

TEST_P(ChunkWorkTest, TensorsWithoutParametersAndBlocksThatAreNotFiniteStayAsTheyAre) {
  const swap::Chunk& chunk = layout_->chunks().front();
  auto gradient = gradient_of(chunk, 1);
  const auto pieces = pieces_of(model_, chunk);
  ASSERT_EQ(pieces.size(), 2U);
  gradient[pieces[1].in_chunk + 700] = 0x7f80;
  const auto words = words_[0];
  const auto state = state_[0];
  EXPECT_EQ(work_->update_pieces(chunk, bytes_of(gradient), bytes_of(words_[0]), bytes_of(state_[0]),
                                 [](const TensorPiece& piece) -> std::optional<optim::AdamWParams> {
                                   if (piece.tensor->tensor == 0) return std::nullopt;
                                   return params_of(1);
                                 }),
            pieces[1].elements - optim::kBlock);
  const auto changed = [&](std::uint64_t from, std::uint64_t to) {
    return !std::equal(words.begin() + static_cast<std::ptrdiff_t>(from),
                       words.begin() + static_cast<std::ptrdiff_t>(to),
                       words_[0].begin() + static_cast<std::ptrdiff_t>(from));
  };
  const std::uint64_t second = pieces[1].in_chunk;
  EXPECT_FALSE(changed(0, second));
  EXPECT_TRUE(changed(second, second + 512));
  EXPECT_FALSE(changed(second + 512, second + 768));
  const std::size_t before_moments = GetParam() == Precision::bf16_sr_adam8 ? 0 : 2 * chunk.elements;
  EXPECT_EQ(std::memcmp(state.data() + before_moments, state_[0].data() + before_moments, pieces[0].elements), 0);
}

TEST_P(ChunkWorkTest, MeasuresWhatIsThere) {
  const swap::Chunk& chunk = layout_->chunks().front();
  for (const bool finite : {true, false}) {
    auto gradient = gradient_of(chunk, 1);
    double squares = 0;
    for (const std::uint16_t word : gradient) squares += std::pow(double{optim::float_from_bf16(word)}, 2);
    if (!finite) gradient[3 * optim::kNormSegment + 5] = 0x7f80;
    work_->measure_pieces(chunk, work_->segments_of(chunk), bytes_of(gradient));
    const auto& measured = work_->measured(chunk);
    EXPECT_EQ(measured.finite, finite);
    ASSERT_EQ(measured.squares.size(), (chunk.elements + optim::kNormSegment - 1) / optim::kNormSegment);
    double sum = 0;
    for (const double each : measured.squares) sum += each;
    if (finite) {
      EXPECT_NEAR(sum, squares, 1e-12 * squares);
    }
  }
}

TEST_P(ChunkWorkTest, NoPieceCrossesAMultipleOfTheMost) {
  for (const std::uint64_t most : {std::uint64_t{optim::kBlock}, std::uint64_t{optim::kNormSegment}})
    for (const swap::Chunk& chunk : layout_->chunks()) {
      std::uint64_t sum = 0;
      for (const TensorPiece& piece : pieces_of(model_, chunk, most)) {
        EXPECT_EQ(piece.in_chunk / most, (piece.in_chunk + piece.elements - 1) / most) << most;
        sum += piece.elements;
      }
      EXPECT_EQ(sum, parameters_in(model_, chunk));
    }
}

INSTANTIATE_TEST_SUITE_P(Precisions, ChunkWorkTest,
                         ::testing::Values(Precision::fp32_master_adam8, Precision::bf16_sr_adam8),
                         [](const auto& of) { return of.param == Precision::bf16_sr_adam8 ? "Bf16Sr" : "Fp32Master"; });

// The key is part of what a state means: a resumed run draws the same numbers.
TEST(RoundingKeys, AreOfTheSeedTheUnitAndTheTensor) {
  EXPECT_EQ(rounding_key(0, 0, 0), 0U);
  EXPECT_EQ(rounding_key(0, 3, 700), 0x3000002bcULL);
  EXPECT_EQ(rounding_key(0xf00000000000000fULL, 3, 700), 0xf0000003000002b3ULL);
}

}  // namespace
}  // namespace tierflow

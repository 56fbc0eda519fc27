// One byte an element: FP8, compressed-tensors, and 8 bits of bitsandbytes.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <initializer_list>
#include <optional>

#include "runtime/base/files.h"
#include "runtime/checkpoint/packed_kinds.h"
#include "runtime/spec/weight_codes.h"

namespace tierflow {
namespace {

using Shape = std::vector<std::int64_t>;

class EightBits final : public PackedWeight {
 public:
  EightBits(const PackedLookup& parts, PackedScales kind, std::string scales, const std::string& aside)
      : folder_(parts.folder()),
        scales_(std::move(scales)),
        codes_(*folder_.find(parts.name())),
        fp8_(codes_.dtype == "F8_E4M3"),
        unit_(kind == PackedScales::rows_of_integers ? 127 : 1) {
    shape_ = codes_.shape;
    const bool integers = kind == PackedScales::rows_of_integers;
    if (shape_.size() < 2 || (integers && shape_.size() > 2) ||
        std::ranges::any_of(shape_, [](auto n) { return n < 1; }))
      parts.fail("is no matrix");
    rows_ = static_cast<std::uint64_t>(shape_.rbegin()[1]);
    columns_ = columns_a_scale_ = static_cast<std::uint64_t>(shape_.back());
    matrices_ = packed_elements(shape_) / (rows_ * columns_);
    if (!integers) read_shape();
    across_ = (columns_ + columns_a_scale_ - 1) / columns_a_scale_;
    down_ = (rows_ + rows_a_scale_ - 1) / rows_a_scale_;
    parts.need_floats(scales_, packed_elements(shape_) / (rows_ * columns_) * down_ * across_);
    if (const Shape& there = folder_.find(scales_)->shape; wanted_ && there != *wanted_)
      parts.fail(fmt::format("has a part {} of shape [{}], not [{}]", printable(scales_, 200), fmt::join(there, ", "),
                             fmt::join(*wanted_, ", ")));
    parts_ = {scales_};
    if (folder_.find(aside) != nullptr) parts_.push_back(aside);
  }

  void read(std::uint64_t first, std::span<float> out) const override {
    while (!out.empty()) {
      const std::uint64_t count = std::min<std::uint64_t>(kPackedPiece, out.size());
      const std::uint64_t top = scale_row(first / columns_), bottom = scale_row((first + count - 1) / columns_);
      const auto scales = packed_floats(folder_, scales_, top * across_, (bottom - top + 1) * across_);
      const auto codes = packed_bytes(folder_, codes_, first, count);
      for (std::uint64_t i = 0, run = 0; i < count; i += run) {
        const std::uint64_t row = (first + i) / columns_, column = (first + i) % columns_;
        const std::uint64_t tile = column / columns_a_scale_;
        run = std::min({(tile + 1) * columns_a_scale_ - column, columns_ - column, count - i});
        const float scale = scales[(scale_row(row) - top) * across_ + tile];
        if (fp8_)
          for (std::uint64_t at = i; at < i + run; ++at) out[at] = weights::e4m3(codes[at]) * scale;
        else
          for (std::uint64_t at = i; at < i + run; ++at)
            out[at] = static_cast<float>(static_cast<std::int8_t>(codes[at])) * scale / unit_;
      }
      out = out.subspan(count);
      first += count;
    }
  }

  bool has(WeightFormat format) const override {
    if (format == WeightFormat::fp8) return fp8_ && tiled_ && (matrices_ == 1 || rows_ % weights::kFp8Tile == 0);
    return fp8_ && format == WeightFormat::fp8_rows && across_ == 1;
  }

  std::vector<std::byte> read_unconverted(WeightFormat format, std::uint64_t first,
                                          std::uint64_t count) const override {
    const std::uint64_t row = first / columns_, rows = count / columns_;
    const std::uint64_t within = format == WeightFormat::fp8 ? rows_ : 1;  // tiles are those of whole matrices
    if (!has(format) || first % columns_ != 0 || count % columns_ != 0 || row % within != 0 || rows % within != 0 ||
        rows == 0 || first + count > packed_elements(shape_))
      return PackedWeight::read_unconverted(format, first, count);
    const WeightLayout at =
        weight_layout(format, {static_cast<std::int64_t>(rows), static_cast<std::int64_t>(columns_)});
    std::vector<std::byte> stored(at.bytes);
    folder_.read(codes_, first, std::span(stored).first(at.elements));
    const std::uint64_t top = scale_row(row), bottom = scale_row(row + rows - 1);
    std::vector<float> scales = packed_floats(folder_, scales_, top * across_, (bottom - top + 1) * across_);
    if (format == WeightFormat::fp8_rows) {
      std::vector<float> of_rows(rows);
      for (std::uint64_t i = 0; i < rows; ++i) of_rows[i] = scales[scale_row(row + i) - top];
      scales = std::move(of_rows);
    }
    std::ranges::copy(std::as_bytes(std::span(scales)), stored.begin() + static_cast<std::ptrdiff_t>(at.scales));
    return stored;
  }

 private:
  // What has a scale of its own, by the shape of the part that holds them.
  void read_shape() {
    const Shape& there = folder_.find(scales_)->shape;
    const Shape matrices(shape_.begin(), shape_.end() - 2);
    const auto each = [&](std::initializer_list<std::int64_t> of_one) {
      Shape shape = matrices;
      shape.insert(shape.end(), of_one);
      return shape;
    };
    constexpr std::int64_t kTile = weights::kFp8Tile;
    const std::int64_t rows = shape_.rbegin()[1], columns = shape_.back();
    const Shape tiles = each({(rows + kTile - 1) / kTile, (columns + kTile - 1) / kTile});
    tiled_ = there == tiles;
    const Shape tiles_of_one = {1, 1};  // a larger weight that has this lacks tiles
    if (packed_elements(there) == 1 && (there != tiles_of_one || tiled_)) {
      rows_ = rows_a_scale_ = matrices_ * rows_;
    } else if (!matrices.empty() && (there == each({}) || there == each({1}) || there == each({1, 1}))) {
      rows_a_scale_ = rows_;
    } else if (there != each({rows}) && there != each({rows, 1})) {
      rows_a_scale_ = columns_a_scale_ = kTile;
      wanted_ = tiles;
    }
  }

  // The row of scales that is for a row of all matrices below each other.
  std::uint64_t scale_row(std::uint64_t row) const { return row / rows_ * down_ + row % rows_ / rows_a_scale_; }

  const PackedParts& folder_;
  const std::string scales_;
  const RawTensor codes_;
  const bool fp8_;
  const float unit_;  // the code of an integer that stands for its scale
  bool tiled_ = false;
  std::optional<Shape> wanted_;
  std::uint64_t matrices_ = 1, rows_ = 1, columns_ = 1;  // rows: of a matrix; of all where these have one scale
  std::uint64_t rows_a_scale_ = 1, columns_a_scale_ = 1;
  std::uint64_t across_ = 1, down_ = 1;  // scales of a matrix
};

}  // namespace

std::shared_ptr<const PackedWeight> packed_eight_bits(const PackedLookup& parts, PackedScales kind,
                                                      const std::string& scales, const std::string& aside) {
  return std::make_shared<EightBits>(parts, kind, scales, aside);
}

}  // namespace tierflow

// MXFP4, as gpt-oss has its experts.
#include <algorithm>
#include <mutex>

#include "runtime/checkpoint/packed_kinds.h"
#include "runtime/spec/weight_codes.h"

namespace tierflow {
namespace {

using weights::kMxBlock;

class Mxfp4 final : public PackedWeight {
 public:
  Mxfp4(const PackedLookup& parts, const RawTensor& codes, const std::string& scales)
      : folder_(parts.folder()), codes_(codes) {
    const std::vector<std::int64_t>& s = codes.shape;
    if (s.size() != 4 || s[0] < 1 || s[1] < 1 || s[2] < 1 || s[3] != kMxBlock / 2)
      parts.fail("has blocks that are not [experts, out, in / 32, 16]");
    blocks_ = static_cast<std::uint64_t>(s[2]);
    columns_ = static_cast<std::uint64_t>(s[1]);
    rows_ = blocks_ * kMxBlock;
    scales_ = parts.need(scales, codes.bytes / (kMxBlock / 2));
    if (scales_.dtype != "U8") parts.fail("has scales of type " + scales_.dtype + ", not U8");
    shape_ = {s[0], static_cast<std::int64_t>(rows_), s[1]};
    parts_ = {scales};
  }

  // An expert's values are the transpose of its codes: a few rows of them take all of its codes. So these are kept from
  // one call to the next, until the expert's last value is read.
  void read(std::uint64_t first, std::span<float> out) const override {
    while (!out.empty()) {
      const std::uint64_t of_one = rows_ * columns_, expert = first / of_one, from = first % of_one;
      const std::uint64_t count = std::min<std::uint64_t>(of_one - from, out.size());
      const std::shared_ptr<const Expert> codes = codes_of(expert);
      decode(*codes, from, out.first(count));
      if (from + count == of_one) {
        const std::lock_guard lock(mutex_);
        last_.reset();
      }
      out = out.subspan(count);
      first += count;
    }
  }

  bool has(WeightFormat format) const override { return format == WeightFormat::mxfp4 && columns_ % 2 == 0; }
  std::vector<std::byte> read_unconverted(WeightFormat format, std::uint64_t first,
                                          std::uint64_t count) const override {
    const std::uint64_t of_one = rows_ * columns_, experts = count / of_one;
    if (!has(format) || first % of_one != 0 || count % of_one != 0 || count == 0 ||
        first + count > packed_elements(shape_))
      return PackedWeight::read_unconverted(format, first, count);
    const WeightLayout at = weight_layout(
        WeightFormat::mxfp4, {static_cast<std::int64_t>(experts * rows_), static_cast<std::int64_t>(columns_)});
    std::vector<std::byte> stored(at.bytes);
    for (std::uint64_t i = 0; i < experts; ++i)
      turn(read_expert(first / of_one + i), stored.data() + i * of_one / 2,
           stored.data() + at.scales + i * of_one / kMxBlock);
    return stored;
  }

 private:
  struct Expert {
    std::uint64_t number;
    std::vector<std::uint8_t> codes, scales;  // [out, in / 2], [out, in / 32]
  };

  std::shared_ptr<const Expert> codes_of(std::uint64_t expert) const {
    const std::lock_guard lock(mutex_);
    if (last_ == nullptr || last_->number != expert) {
      last_.reset();
      last_ = std::make_shared<const Expert>(read_expert(expert));
    }
    return last_;
  }

  // The codes and scales of its transpose, as WeightFormat::mxfp4 has them.
  void turn(const Expert& expert, std::byte* codes, std::byte* scales) const {
    // Two codes of a column become the first or second halves of bytes in two rows.
    for (std::uint64_t row = 0; row < rows_; row += 2)
      for (std::uint64_t column = 0; column < columns_; column += 2) {
        const std::uint8_t left = expert.codes[(column * rows_ + row) / 2];
        const std::uint8_t right = expert.codes[((column + 1) * rows_ + row) / 2];
        codes[(row * columns_ + column) / 2] = static_cast<std::byte>((left & 15U) | (right & 15U) << 4);
        codes[((row + 1) * columns_ + column) / 2] = static_cast<std::byte>(left >> 4 | (right & 0xf0U));
      }
    for (std::uint64_t block = 0; block < blocks_; ++block)
      for (std::uint64_t column = 0; column < columns_; ++column)
        scales[block * columns_ + column] = static_cast<std::byte>(expert.scales[column * blocks_ + block]);
  }

  Expert read_expert(std::uint64_t number) const {
    const std::uint64_t codes = columns_ * rows_ / 2, scales = columns_ * blocks_;
    return {.number = number,
            .codes = packed_bytes(folder_, codes_, number * codes, codes),
            .scales = packed_bytes(folder_, scales_, number * scales, scales)};
  }

  void decode(const Expert& expert, std::uint64_t from, std::span<float> out) const {
    const std::uint64_t stride = rows_ / 2, to = from + out.size();
    for (std::uint64_t row = from / columns_; row * columns_ < to; ++row) {
      const std::uint64_t at = row * columns_, low = from > at ? from - at : 0;
      for (std::uint64_t column = low; column < std::min(columns_, to - at); ++column) {
        const std::uint8_t byte = expert.codes[column * stride + row / 2];
        const std::uint8_t scale = expert.scales[column * blocks_ + row / kMxBlock];
        out[at + column - from] = weights::e2m1(row % 2 == 0 ? byte : byte >> 4) * weights::e8m0(scale);
      }
    }
  }

  const PackedParts& folder_;
  const RawTensor codes_;
  RawTensor scales_;
  std::uint64_t blocks_ = 1, rows_ = kMxBlock, columns_ = 1;
  mutable std::mutex mutex_;
  mutable std::shared_ptr<const Expert> last_;
};

}  // namespace

std::shared_ptr<const PackedWeight> packed_mxfp4(const PackedLookup& parts, const RawTensor& codes,
                                                 const std::string& scales) {
  return std::make_shared<Mxfp4>(parts, codes, scales);
}

}  // namespace tierflow

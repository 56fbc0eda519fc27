#include "runtime/checkpoint/packed_weight.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <mutex>
#include <optional>

#include "runtime/base/exception.h"
#include "runtime/base/files.h"
#include "runtime/base/strict_json.h"
#include "runtime/spec/weight_codes.h"
#include "runtime/spec/weight_format.h"

namespace tierflow {
namespace {

constexpr std::uint64_t kStateLimit = 1 << 16;
using weights::kMxBlock;
constexpr std::uint64_t kPiece = 1 << 18;  // elements that are decoded at once
constexpr std::string_view kBlocks = "_blocks";
constexpr const char* kScales = "_scales";

std::uint64_t elements_of(const std::vector<std::int64_t>& shape) {
  std::uint64_t count = 1;
  for (const std::int64_t size : shape)
    if (size < 0 || __builtin_mul_overflow(count, static_cast<std::uint64_t>(size), &count)) return UINT64_MAX;
  return count;
}

// Parts of one weight, looked up and checked.
class Parts {
 public:
  Parts(std::string name, std::string where, const PackedParts& parts)
      : name_(std::move(name)), where_(std::move(where)), parts_(parts) {}

  [[noreturn]] void fail(const std::string& detail) const {
    fail_input(where_, fmt::format("the quantised weight {} {}", printable(name_, 200), detail));
  }
  // Of `elements` elements.
  const RawTensor& need(const std::string& part, std::uint64_t elements) const {
    const RawTensor* found = parts_.find(part);
    if (found == nullptr) fail("lacks its part " + printable(part, 200));
    if (elements_of(found->shape) != elements)
      fail(fmt::format("has a part {} of {} elements, not {}", printable(part, 200), elements_of(found->shape),
                       elements));
    return *found;
  }
  void need_floats(const std::string& part, std::uint64_t elements) const {
    const RawTensor& found = need(part, elements);
    if (found.dtype != "F32" && found.dtype != "BF16" && found.dtype != "F16")
      fail(fmt::format("has a part {} of type {}", printable(part, 200), found.dtype));
  }
  std::string text(const RawTensor& tensor) const {
    if (tensor.bytes > kStateLimit) fail("has a description that is too long");
    std::string text(tensor.bytes, '\0');
    parts_.read(tensor, 0, std::as_writable_bytes(std::span(text)));
    return text;
  }
  const PackedParts& folder() const { return parts_; }
  const std::string& name() const { return name_; }
  const std::string& where() const { return where_; }

 private:
  const std::string name_, where_;
  const PackedParts& parts_;
};

std::vector<std::uint8_t> bytes_of(const PackedParts& folder, const RawTensor& tensor, std::uint64_t first,
                                   std::uint64_t count) {
  std::vector<std::uint8_t> bytes(count);
  folder.read(tensor, first, std::as_writable_bytes(std::span(bytes)));
  return bytes;
}
std::vector<float> floats_of(const PackedParts& folder, const std::string& part, std::uint64_t first,
                             std::uint64_t count) {
  std::vector<float> values(count);
  folder.floats(part, first, values);
  return values;
}

class FourBits final : public PackedWeight {
 public:
  FourBits(const Parts& parts, const std::string& state_name)
      : folder_(parts.folder()), absmax_(parts.name() + ".absmax") {
    const RawTensor* state_tensor = folder_.find(state_name);
    const Json state = parse_json(parts.text(*state_tensor), parts.where() + ": " + printable(state_name, 200));
    if (!state.is_object() || !state.contains("shape") || !state["shape"].is_array())
      parts.fail("does not give its shape");
    for (const Json& size : state["shape"]) {
      if (!size.is_number_integer() || size < 0) parts.fail("does not give its shape");
      shape_.push_back(size.get<std::int64_t>());
    }
    const JsonFields fields(state, parts.where() + ": " + printable(state_name, 200));
    elements_ = elements_of(shape_);
    block_ = static_cast<std::uint64_t>(fields.integer_or("blocksize", 64, 1, 1 << 20));
    codes_ = *folder_.find(parts.name());
    if (elements_ > UINT64_MAX / 2 || codes_.bytes < (elements_ + 1) / 2)
      parts.fail(fmt::format("has {} bytes of codes for {} elements", codes_.bytes, elements_));
    const std::uint64_t blocks = (elements_ + block_ - 1) / block_;
    const std::string map = parts.name() + ".quant_map", nested_map = parts.name() + ".nested_quant_map";
    nested_name_ = parts.name() + ".nested_absmax";
    parts.need_floats(map, map_.size());
    folder_.floats(map, 0, map_);
    const bool known = block_ == weights::kNf4Block && map_ == std::to_array(weights::kNf4.at);
    parts_ = {absmax_, map, state_name};
    nested_ = folder_.find(nested_name_) != nullptr;
    if (!nested_) {
      parts.need_floats(absmax_, blocks);
      if (known) format_ = WeightFormat::nf4;
      return;
    }
    nested_block_ = static_cast<std::uint64_t>(fields.integer_or("nested_blocksize", 256, 1, 1 << 20));
    offset_ = static_cast<float>(fields.number_or("nested_offset", 0, -1e30, 1e30));
    absmax_codes_ = parts.need(absmax_, blocks);
    if (absmax_codes_.dtype != "U8") parts.fail("has scales of type " + absmax_codes_.dtype + ", not U8");
    parts.need_floats(nested_name_, (blocks + nested_block_ - 1) / nested_block_);
    parts.need_floats(nested_map, nested_map_.size());
    folder_.floats(nested_map, 0, nested_map_);
    if (known && nested_block_ == weights::kNestedBlock && nested_map_ == std::to_array(weights::kDynamic.at))
      format_ = WeightFormat::nf4_double;
    parts_.insert(parts_.end(), {nested_name_, nested_map});
  }

  void read(std::uint64_t first, std::span<float> out) const override {
    while (!out.empty()) {
      const std::uint64_t count = std::min<std::uint64_t>(kPiece, out.size());
      const std::uint64_t first_block = first / block_, last_block = (first + count - 1) / block_;
      const std::vector<float> scales = scales_of(first_block, last_block - first_block + 1);
      const std::uint64_t first_byte = first / 2;
      const auto codes = bytes_of(folder_, codes_, first_byte, (first + count + 1) / 2 - first_byte);
      for (std::uint64_t i = 0, run = 0; i < count; i += run) {
        const std::uint64_t block = (first + i) / block_;
        run = std::min((block + 1) * block_ - (first + i), count - i);
        const float scale = scales[block - first_block];
        for (std::uint64_t at = first + i; at < first + i + run; ++at) {
          const std::uint8_t byte = codes[at / 2 - first_byte];
          out[at - first] = map_[at % 2 == 0 ? byte >> 4 : byte & 15] * scale;
        }
      }
      out = out.subspan(count);
      first += count;
    }
  }

  bool has(WeightFormat format) const override { return format_ == format; }
  std::vector<std::byte> read_unconverted(std::uint64_t first, std::uint64_t count) const override {
    if (!format_ || first != 0 || count != elements_) return PackedWeight::read_unconverted(first, count);
    const WeightLayout at = weight_layout(*format_, shape_);
    std::vector<std::byte> stored(at.bytes);
    folder_.read(codes_, 0, std::span(stored).first((elements_ + 1) / 2));
    const std::uint64_t blocks = (elements_ + block_ - 1) / block_;
    if (!nested_) {
      copy_floats(absmax_, blocks, stored.data() + at.scales);
      return stored;
    }
    folder_.read(absmax_codes_, 0, std::span(stored).subspan(at.scales, blocks));
    copy_floats(nested_name_, (blocks + nested_block_ - 1) / nested_block_, stored.data() + at.nested);
    std::memcpy(stored.data() + at.offset, &offset_, sizeof(offset_));
    return stored;
  }

 private:
  void copy_floats(const std::string& part, std::uint64_t count, std::byte* out) const {
    for (std::uint64_t first = 0; first < count; first += kPiece) {
      const std::vector<float> values = floats_of(folder_, part, first, std::min(kPiece, count - first));
      std::memcpy(out + first * sizeof(float), values.data(), values.size() * sizeof(float));
    }
  }

  std::vector<float> scales_of(std::uint64_t first, std::uint64_t count) const {
    if (!nested_) return floats_of(folder_, absmax_, first, count);
    const auto codes = bytes_of(folder_, absmax_codes_, first, count);
    const std::uint64_t outer = first / nested_block_;
    const auto nested = floats_of(folder_, nested_name_, outer, (first + count - 1) / nested_block_ - outer + 1);
    std::vector<float> scales(count);
    for (std::uint64_t i = 0; i < count; ++i)
      scales[i] = nested_map_[codes[i]] * nested[(first + i) / nested_block_ - outer] + offset_;
    return scales;
  }

  const PackedParts& folder_;
  const std::string absmax_;
  std::string nested_name_;
  RawTensor codes_, absmax_codes_;
  std::uint64_t elements_ = 0, block_ = 64, nested_block_ = 256;
  bool nested_ = false;
  float offset_ = 0;
  std::array<float, 16> map_{};
  std::array<float, 256> nested_map_{};
  std::optional<WeightFormat> format_;  // that its codes and scales are, as they lie
};

// One byte an element, and a scale for each row or tile, or for all.
class EightBits final : public PackedWeight {
 public:
  enum class Scales { rows, tiles, as_shaped };
  // scales: the part that holds them. aside: another part that there may be, which changes no value.
  EightBits(const Parts& parts, Scales kind, std::string scales, const std::string& aside)
      : folder_(parts.folder()),
        scales_(std::move(scales)),
        codes_(*folder_.find(parts.name())),
        fp8_(codes_.dtype == "F8_E4M3"),
        unit_(kind == Scales::rows ? 127 : 1) {
    shape_ = codes_.shape;
    if (shape_.size() != 2 || shape_[0] < 1 || shape_[1] < 1) parts.fail("is no matrix");
    const auto rows = static_cast<std::uint64_t>(shape_[0]);
    columns_ = static_cast<std::uint64_t>(shape_[1]);
    constexpr std::int64_t tile = weights::kFp8Tile;
    const std::vector<std::int64_t>& there = folder_.find(scales_)->shape;
    const bool for_all = kind == Scales::as_shaped && elements_of(there) == 1;
    const bool a_row_each = there == std::vector{shape_[0]} || there == std::vector<std::int64_t>{shape_[0], 1};
    tiled_ =
        kind != Scales::rows && (kind == Scales::tiles || (!for_all && !a_row_each) ||
                                 there == std::vector{(shape_[0] + tile - 1) / tile, (shape_[1] + tile - 1) / tile});
    rows_a_scale_ = tiled_ ? tile : for_all ? rows : 1;
    columns_a_scale_ = tiled_ ? tile : columns_;
    across_ = (columns_ + columns_a_scale_ - 1) / columns_a_scale_;
    parts.need_floats(scales_, (rows + rows_a_scale_ - 1) / rows_a_scale_ * across_);
    parts_ = {scales_};
    if (folder_.find(aside) != nullptr) parts_.push_back(aside);
  }

  void read(std::uint64_t first, std::span<float> out) const override {
    while (!out.empty()) {
      const std::uint64_t count = std::min<std::uint64_t>(kPiece, out.size());
      const std::uint64_t top = first / columns_ / rows_a_scale_;
      const std::uint64_t bottom = (first + count - 1) / columns_ / rows_a_scale_;
      const auto scales = floats_of(folder_, scales_, top * across_, (bottom - top + 1) * across_);
      const auto codes = bytes_of(folder_, codes_, first, count);
      for (std::uint64_t i = 0, run = 0; i < count; i += run) {
        const std::uint64_t row = (first + i) / columns_, column = (first + i) % columns_;
        const std::uint64_t tile = column / columns_a_scale_;
        run = std::min({(tile + 1) * columns_a_scale_ - column, columns_ - column, count - i});
        const float scale = scales[(row / rows_a_scale_ - top) * across_ + tile];
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

  bool has(WeightFormat format) const override { return fp8_ && tiled_ && format == WeightFormat::fp8; }
  std::vector<std::byte> read_unconverted(std::uint64_t first, std::uint64_t count) const override {
    if (first != 0 || count != elements_of(shape_)) return PackedWeight::read_unconverted(first, count);
    const WeightLayout at = weight_layout(WeightFormat::fp8, shape_);
    std::vector<std::byte> stored(at.bytes);
    folder_.read(codes_, 0, std::span(stored).first(at.elements));
    std::vector<float> scales((at.bytes - at.scales) / sizeof(float));
    folder_.floats(scales_, 0, scales);
    std::ranges::copy(std::as_bytes(std::span(scales)), stored.begin() + static_cast<std::ptrdiff_t>(at.scales));
    return stored;
  }

 private:
  const PackedParts& folder_;
  const std::string scales_;
  const RawTensor codes_;
  const bool fp8_;
  const float unit_;  // the code of an integer that stands for its scale
  bool tiled_ = false;
  std::uint64_t columns_ = 1, rows_a_scale_ = 1, columns_a_scale_ = 1, across_ = 1;
};

class FourBitsOfExperts final : public PackedWeight {
 public:
  FourBitsOfExperts(const Parts& parts, const RawTensor& codes)
      : folder_(parts.folder()), codes_(codes), scales_name_(parts.name() + kScales) {
    const std::vector<std::int64_t>& s = codes.shape;
    if (s.size() != 4 || s[0] < 1 || s[1] < 1 || s[2] < 1 || s[3] != kMxBlock / 2)
      parts.fail("has blocks that are not [experts, out, in / 32, 16]");
    blocks_ = static_cast<std::uint64_t>(s[2]);
    columns_ = static_cast<std::uint64_t>(s[1]);
    rows_ = blocks_ * kMxBlock;
    scales_ = parts.need(scales_name_, codes.bytes / (kMxBlock / 2));
    if (scales_.dtype != "U8") parts.fail("has scales of type " + scales_.dtype + ", not U8");
    shape_ = {s[0], static_cast<std::int64_t>(rows_), s[1]};
    parts_ = {scales_name_};
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
  std::vector<std::byte> read_unconverted(std::uint64_t first, std::uint64_t count) const override {
    const std::uint64_t of_one = rows_ * columns_, experts = count / of_one;
    if (first % of_one != 0 || count % of_one != 0 || count == 0 || first + count > elements_of(shape_))
      return PackedWeight::read_unconverted(first, count);
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
            .codes = bytes_of(folder_, codes_, number * codes, codes),
            .scales = bytes_of(folder_, scales_, number * scales, scales)};
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
  const std::string scales_name_;
  RawTensor scales_;
  std::uint64_t blocks_ = 1, rows_ = kMxBlock, columns_ = 1;
  mutable std::mutex mutex_;
  mutable std::shared_ptr<const Expert> last_;
};

}  // namespace

std::vector<std::byte> PackedWeight::read_unconverted(std::uint64_t first, std::uint64_t count) const {
  throw Exception(io::ErrorKind::internal,
                  fmt::format("{} elements from {} on are no weights that a folder has packed", count, first));
}

std::string packed_name(const std::string& name_of_codes) {
  return name_of_codes.ends_with(kBlocks) ? name_of_codes.substr(0, name_of_codes.size() - kBlocks.size())
                                          : name_of_codes;
}

std::shared_ptr<const PackedWeight> packed_weight(const std::string& name, const std::string& where,
                                                  const PackedParts& folder) {
  const Parts parts(name, where, folder);
  const RawTensor* codes = folder.find(name);
  if (codes == nullptr) {
    const RawTensor* blocks = folder.find(name + std::string(kBlocks));
    if (blocks == nullptr || blocks->dtype != "U8") return nullptr;
    return std::make_shared<FourBitsOfExperts>(parts, *blocks);
  }
  for (const char* type : {"nf4", "fp4"})
    if (const std::string state = name + ".quant_state.bitsandbytes__" + type; folder.find(state) != nullptr)
      return std::make_shared<FourBits>(parts, state);
  constexpr std::string_view weight = "weight";
  const std::string module = name.ends_with(weight) ? name.substr(0, name.size() - weight.size()) : "";
  const auto eight_bits = [&](EightBits::Scales kind, const std::string& scales, const std::string& aside) {
    return folder.find(scales) == nullptr ? nullptr : std::make_shared<EightBits>(parts, kind, scales, aside);
  };
  std::shared_ptr<const PackedWeight> found;
  if (codes->dtype == "F8_E4M3") found = eight_bits(EightBits::Scales::tiles, name + "_scale_inv", "");
  // bitsandbytes notes the layout in memory; of the layout here there is one.
  if (codes->dtype == "I8" && !module.empty())
    found = eight_bits(EightBits::Scales::rows, module + "SCB", module + "weight_format");
  if (found == nullptr && (codes->dtype == "F8_E4M3" || codes->dtype == "I8"))
    found = eight_bits(EightBits::Scales::as_shaped, name + "_scale", module + "input_scale");
  return found;
}

}  // namespace tierflow

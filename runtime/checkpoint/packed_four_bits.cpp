// Four bits of bitsandbytes.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>

#include "runtime/base/files.h"
#include "runtime/base/strict_json.h"
#include "runtime/checkpoint/packed_kinds.h"
#include "runtime/spec/weight_codes.h"

namespace tierflow {
namespace {

class FourBits final : public PackedWeight {
 public:
  FourBits(const PackedLookup& parts, const std::string& state_name)
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
    elements_ = packed_elements(shape_);
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
      const std::uint64_t count = std::min<std::uint64_t>(kPackedPiece, out.size());
      const std::uint64_t first_block = first / block_, last_block = (first + count - 1) / block_;
      const std::vector<float> scales = scales_of(first_block, last_block - first_block + 1);
      const std::uint64_t first_byte = first / 2;
      const auto codes = packed_bytes(folder_, codes_, first_byte, (first + count + 1) / 2 - first_byte);
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
  std::vector<std::byte> read_unconverted(WeightFormat format, std::uint64_t first,
                                          std::uint64_t count) const override {
    if (!format_ || format != *format_ || first != 0 || count != elements_)
      return PackedWeight::read_unconverted(format, first, count);
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
    for (std::uint64_t first = 0; first < count; first += kPackedPiece) {
      const std::vector<float> values = packed_floats(folder_, part, first, std::min(kPackedPiece, count - first));
      std::memcpy(out + first * sizeof(float), values.data(), values.size() * sizeof(float));
    }
  }

  std::vector<float> scales_of(std::uint64_t first, std::uint64_t count) const {
    if (!nested_) return packed_floats(folder_, absmax_, first, count);
    const auto codes = packed_bytes(folder_, absmax_codes_, first, count);
    const std::uint64_t outer = first / nested_block_;
    const auto nested = packed_floats(folder_, nested_name_, outer, (first + count - 1) / nested_block_ - outer + 1);
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

}  // namespace

std::shared_ptr<const PackedWeight> packed_four_bits(const PackedLookup& parts, const std::string& state) {
  return std::make_shared<FourBits>(parts, state);
}

}  // namespace tierflow

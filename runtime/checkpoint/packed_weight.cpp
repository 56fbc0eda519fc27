#include "runtime/checkpoint/packed_weight.h"

#include <fmt/format.h>

#include <cstddef>
#include <utility>

#include "runtime/base/exception.h"
#include "runtime/base/files.h"
#include "runtime/checkpoint/packed_kinds.h"
#include "runtime/spec/weight_format.h"

namespace tierflow {
namespace {

constexpr std::uint64_t kStateLimit = 1 << 16;
constexpr std::string_view kBlocks = "_blocks";

}  // namespace

std::uint64_t packed_elements(const std::vector<std::int64_t>& shape) {
  std::uint64_t count = 1;
  for (const std::int64_t size : shape)
    if (size < 0 || __builtin_mul_overflow(count, static_cast<std::uint64_t>(size), &count)) return UINT64_MAX;
  return count;
}

PackedLookup::PackedLookup(std::string name, std::string where, const PackedParts& parts)
    : name_(std::move(name)), where_(std::move(where)), parts_(parts) {}

void PackedLookup::fail(const std::string& detail) const {
  fail_input(where_, fmt::format("the quantised weight {} {}", printable(name_, 200), detail));
}

const RawTensor& PackedLookup::need(const std::string& part, std::uint64_t elements) const {
  const RawTensor* found = parts_.find(part);
  if (found == nullptr) fail("lacks its part " + printable(part, 200));
  if (packed_elements(found->shape) != elements)
    fail(fmt::format("has a part {} of {} elements, not {}", printable(part, 200), packed_elements(found->shape),
                     elements));
  return *found;
}

void PackedLookup::need_floats(const std::string& part, std::uint64_t elements) const {
  const RawTensor& found = need(part, elements);
  if (found.dtype != "F32" && found.dtype != "BF16" && found.dtype != "F16")
    fail(fmt::format("has a part {} of type {}", printable(part, 200), found.dtype));
}

std::string PackedLookup::text(const RawTensor& tensor) const {
  if (tensor.bytes > kStateLimit) fail("has a description that is too long");
  std::string text(tensor.bytes, '\0');
  parts_.read(tensor, 0, std::as_writable_bytes(std::span(text)));
  return text;
}

std::vector<std::uint8_t> packed_bytes(const PackedParts& folder, const RawTensor& tensor, std::uint64_t first,
                                       std::uint64_t count) {
  std::vector<std::uint8_t> bytes(count);
  folder.read(tensor, first, std::as_writable_bytes(std::span(bytes)));
  return bytes;
}

std::vector<float> packed_floats(const PackedParts& folder, const std::string& part, std::uint64_t first,
                                 std::uint64_t count) {
  std::vector<float> values(count);
  folder.floats(part, first, values);
  return values;
}

std::vector<std::byte> PackedWeight::read_unconverted(WeightFormat format, std::uint64_t first,
                                                      std::uint64_t count) const {
  throw Exception(io::ErrorKind::internal,
                  fmt::format("{} elements from {} on are no weights that a folder has packed as {}", count, first,
                              weight_format_name(format)));
}

std::string packed_name(const std::string& name_of_codes) {
  return name_of_codes.ends_with(kBlocks) ? name_of_codes.substr(0, name_of_codes.size() - kBlocks.size())
                                          : name_of_codes;
}

std::shared_ptr<const PackedWeight> packed_weight(const std::string& name, const std::string& where,
                                                  const PackedParts& folder) {
  const PackedLookup parts(name, where, folder);
  const RawTensor* codes = folder.find(name);
  if (codes == nullptr) {
    const RawTensor* blocks = folder.find(name + std::string(kBlocks));
    if (blocks == nullptr || blocks->dtype != "U8") return nullptr;
    return packed_mxfp4(parts, *blocks, name + "_scales");
  }
  for (const char* type : {"nf4", "fp4"})
    if (const std::string state = name + ".quant_state.bitsandbytes__" + type; folder.find(state) != nullptr)
      return packed_four_bits(parts, state);
  constexpr std::string_view weight = "weight";
  // Of a linear layer m.weight is the codes' name, and m.input_scale another part; of experts m.gate_up_proj and
  // m.gate_up_proj_activation_scale.
  const bool linear = name.ends_with(weight);
  const std::string module = linear ? name.substr(0, name.size() - weight.size()) : name + "_";
  const auto eight_bits = [&](PackedScales kind, const std::string& scales, const std::string& aside) {
    return folder.find(scales) == nullptr ? nullptr : packed_eight_bits(parts, kind, scales, aside);
  };
  std::shared_ptr<const PackedWeight> found;
  if (codes->dtype == "F8_E4M3")
    found = eight_bits(PackedScales::as_shaped, name + "_scale_inv", module + "activation_scale");
  // bitsandbytes notes the layout in memory; of the layout here there is one.
  if (codes->dtype == "I8" && linear)
    found = eight_bits(PackedScales::rows_of_integers, module + "SCB", module + "weight_format");
  if (found == nullptr && (codes->dtype == "F8_E4M3" || codes->dtype == "I8"))
    found = eight_bits(PackedScales::as_shaped, name + "_scale", module + "input_scale");
  return found;
}

}  // namespace tierflow

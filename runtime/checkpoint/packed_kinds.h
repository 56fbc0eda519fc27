#pragma once
// The kinds of quantised weights, and what they have in common. Only for packed_weight.cpp and the files of the kinds.
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/checkpoint/packed_weight.h"

namespace tierflow {

inline constexpr std::uint64_t kPackedPiece = 1 << 18;  // elements that are decoded at once

// UINT64_MAX if a size is negative or the product does not fit.
std::uint64_t packed_elements(const std::vector<std::int64_t>& shape);

// Finds and checks the parts of one weight.
class PackedLookup {
 public:
  PackedLookup(std::string name, std::string where, const PackedParts& parts);

  [[noreturn]] void fail(const std::string& detail) const;
  // Of `elements` elements.
  const RawTensor& need(const std::string& part, std::uint64_t elements) const;
  void need_floats(const std::string& part, std::uint64_t elements) const;
  // All of a small tensor.
  std::string text(const RawTensor& tensor) const;
  const PackedParts& folder() const { return parts_; }
  const std::string& name() const { return name_; }
  const std::string& where() const { return where_; }

 private:
  const std::string name_, where_;
  const PackedParts& parts_;
};

std::vector<std::uint8_t> packed_bytes(const PackedParts& folder, const RawTensor& tensor, std::uint64_t first,
                                       std::uint64_t count);
std::vector<float> packed_floats(const PackedParts& folder, const std::string& part, std::uint64_t first,
                                 std::uint64_t count);

// bitsandbytes in 4 bits; state: the name of the part that describes them.
std::shared_ptr<const PackedWeight> packed_four_bits(const PackedLookup& parts, const std::string& state);

// One byte an element, and a scale for each row or tile of a matrix, for each matrix, or for all.
enum class PackedScales {
  rows_of_integers,  // bitsandbytes in 8 bits
  as_shaped          // the shape of the part says which
};
// scales: the part that holds them. aside: another part that there may be, which changes no value.
std::shared_ptr<const PackedWeight> packed_eight_bits(const PackedLookup& parts, PackedScales kind,
                                                      const std::string& scales, const std::string& aside);

// MXFP4 of gpt-oss; codes: its blocks; scales: the name of the part that holds them.
std::shared_ptr<const PackedWeight> packed_mxfp4(const PackedLookup& parts, const RawTensor& codes,
                                                 const std::string& scales);

}  // namespace tierflow

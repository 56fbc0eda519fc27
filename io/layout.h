#pragma once
// Where a byte of the volume lies. Stripe units go to the members (files) in a fixed pattern, to each member as often
// as its weight says.
//   unit n of the volume = row n / W, place n % W of the pattern; W is the sum of the weights.
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace tierflow::io {

struct Piece {
  std::uint32_t member = 0;
  std::uint64_t member_offset = 0;  // in the member's data area
  std::uint64_t volume_offset = 0;
  std::uint64_t length = 0;
};

class Layout {
 public:
  // Weights are positive; unit is a multiple of the alignment.
  Layout(std::uint64_t bytes, std::uint64_t unit, std::vector<std::uint32_t> weights);

  std::uint64_t bytes() const { return bytes_; }
  std::uint64_t unit() const { return unit_; }
  const std::vector<std::uint32_t>& weights() const { return weights_; }
  std::uint64_t member_bytes(std::uint32_t member) const;

  // Calls `visit` for every piece of [offset, offset + length), in order, none longer than `largest`.
  template <class Visit>
  void split(std::uint64_t offset, std::uint64_t length, std::uint64_t largest, Visit&& visit) const {
    const std::uint64_t end = offset + length;
    while (offset < end) {
      Piece piece = locate(offset);
      if (piece.length > largest) piece.length = largest;
      if (piece.length > end - offset) piece.length = end - offset;
      visit(piece);
      offset += piece.length;
    }
  }

 private:
  struct Place {
    std::uint32_t member;
    std::uint32_t nth;  // of this member's places in the pattern
  };
  Piece locate(std::uint64_t offset) const;  // length: up to the end of the contiguous run

  std::uint64_t bytes_;
  std::uint64_t unit_;
  std::vector<std::uint32_t> weights_;
  std::vector<Place> pattern_;
};

// Small integers in about the proportion of `speeds`. With them all members finish within 3% of each other, if 16 units
// of the fastest member suffice for that.
std::vector<std::uint32_t> weights_for(std::span<const double> speeds);

}  // namespace tierflow::io

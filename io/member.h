#pragma once
// The header of every data file: which volume the file belongs to, and which member of that volume it is. It lies at
// byte 0 and once more at 512 KiB, so that a damaged sector does not cost the file.
//   byte 0      magic "TIERFLOW"            8
//        8      format version              u32
//       12      member index, member count  2 x u32
//       20      reserved                    u32
//       24      volume id                   2 x u64
//       40      volume bytes                u64
//       48      stripe unit                 u64
//       56      data bytes of this member   u64
//       64      start of the data area      u64
//       72      weights, one a member       64 x u32
//     4088      XXH3-64 of bytes 0..4087    u64
// Little endian. Of the bytes up to the data area, those from 64 KiB to 320 KiB are scratch space for probing the
// drive. Files of earlier versions have no second header.
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "io/error.h"
#include "io/file.h"

namespace tierflow::io {

inline constexpr std::uint64_t kDataStart = std::uint64_t{1} << 20;
inline constexpr std::uint64_t kSecondHeader = std::uint64_t{512} << 10;
inline constexpr std::uint64_t kScratchStart = std::uint64_t{64} << 10;
inline constexpr std::size_t kMostMembers = 64;

struct MemberHeader {
  std::array<std::uint64_t, 2> volume_id{};
  std::uint32_t index = 0;
  std::uint64_t volume_bytes = 0;
  std::uint64_t stripe_unit = 0;
  std::uint64_t data_bytes = 0;
  std::uint64_t data_start = kDataStart;
  std::vector<std::uint32_t> weights;  // of all members
  std::string first_copy_wrong;        // why the second one was read; empty if it was not

  // Both copies.
  Error write(const File& file) const;
  static Result<MemberHeader> read(const File& file);
};

}  // namespace tierflow::io

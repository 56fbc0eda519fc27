#include "io/member.h"

#include <xxhash.h>

#include <bit>
#include <cstring>

#include "io/buffer.h"

namespace tierflow::io {
namespace {

static_assert(std::endian::native == std::endian::little, "data files are little endian");

constexpr char kMagic[8] = {'T', 'I', 'E', 'R', 'F', 'L', 'O', 'W'};
constexpr std::uint32_t kVersion = 1;

struct Raw {
  char magic[8];
  std::uint32_t version;
  std::uint32_t index;
  std::uint32_t count;
  std::uint32_t reserved;
  std::uint64_t volume_id[2];
  std::uint64_t volume_bytes;
  std::uint64_t stripe_unit;
  std::uint64_t data_bytes;
  std::uint64_t data_start;
  std::uint32_t weights[kMostMembers];
  std::uint8_t zero[4088 - 72 - 4 * kMostMembers];
  std::uint64_t checksum;
};
static_assert(sizeof(Raw) == 4096);

Error rejected(const File& file, ErrorKind kind, std::string detail) {
  return Error{.kind = kind, .operation = "open", .path = file.path(), .detail = std::move(detail)};
}

// The header at `offset`, as it stands there.
Error read_copy(const File& file, std::uint64_t offset, Raw& raw) {
  Buffer block = allocate_buffer(std::max<std::size_t>(sizeof(Raw), file.alignment()));
  if (!block) return Error{.kind = ErrorKind::memory, .operation = "allocate", .length = sizeof(Raw)};
  if (Error error = file.read(offset, block.data(), block.size())) return error;
  std::memcpy(&raw, block.data(), sizeof raw);
  if (std::memcmp(raw.magic, kMagic, sizeof kMagic) != 0) {
    return rejected(file, ErrorKind::input, "it is not a data file of this program, or its creation was interrupted");
  }
  if (raw.checksum != XXH3_64bits(&raw, offsetof(Raw, checksum))) {
    return rejected(file, ErrorKind::corruption, "its header is damaged");
  }
  return {};
}

}  // namespace

Error MemberHeader::write(const File& file) const {
  Buffer block = allocate_buffer(std::max<std::size_t>(sizeof(Raw), file.alignment()));
  if (!block) return Error{.kind = ErrorKind::memory, .operation = "allocate", .length = sizeof(Raw)};
  Raw raw{};
  std::memcpy(raw.magic, kMagic, sizeof kMagic);
  raw.version = kVersion;
  raw.index = index;
  raw.count = static_cast<std::uint32_t>(weights.size());
  raw.volume_id[0] = volume_id[0];
  raw.volume_id[1] = volume_id[1];
  raw.volume_bytes = volume_bytes;
  raw.stripe_unit = stripe_unit;
  raw.data_bytes = data_bytes;
  raw.data_start = data_start;
  for (std::size_t i = 0; i < weights.size(); ++i) raw.weights[i] = weights[i];
  raw.checksum = XXH3_64bits(&raw, offsetof(Raw, checksum));
  std::memcpy(block.data(), &raw, sizeof raw);
  if (Error error = file.write(kSecondHeader, block.data(), block.size())) return error;
  return file.write(0, block.data(), block.size());
}

Result<MemberHeader> MemberHeader::read(const File& file) {
  Result<std::uint64_t> size = file.size();
  if (!size) return size.error();
  if (*size < kDataStart)
    return rejected(file, ErrorKind::input, "it is too short to be a data file, or was never finished");
  Raw raw;
  std::string wrong;
  if (Error first = read_copy(file, 0, raw)) {
    if (read_copy(file, kSecondHeader, raw)) return first;
    wrong = first.message();
  }
  if (raw.version != kVersion) {
    return rejected(
        file, ErrorKind::input,
        "its format version is " + std::to_string(raw.version) + ", this program reads " + std::to_string(kVersion));
  }
  bool sound = raw.count >= 1 && raw.count <= kMostMembers && raw.index < raw.count && raw.data_start >= kDataStart &&
               raw.stripe_unit != 0 && raw.stripe_unit % file.alignment() == 0 &&
               raw.data_start % file.alignment() == 0 && raw.volume_bytes != 0 &&
               raw.data_bytes <= INT64_MAX - raw.data_start;
  for (std::uint32_t i = 0; sound && i < raw.count; ++i) sound = raw.weights[i] >= 1 && raw.weights[i] <= 4096;
  if (!sound) return rejected(file, ErrorKind::input, "its header makes no sense on this drive");
  if (*size != raw.data_start + raw.data_bytes) {
    return rejected(
        file, ErrorKind::corruption,
        "it has " + std::to_string(*size) + " bytes and must have " + std::to_string(raw.data_start + raw.data_bytes));
  }
  MemberHeader header{.volume_id = {raw.volume_id[0], raw.volume_id[1]},
                      .index = raw.index,
                      .volume_bytes = raw.volume_bytes,
                      .stripe_unit = raw.stripe_unit,
                      .data_bytes = raw.data_bytes,
                      .data_start = raw.data_start};
  header.weights.assign(raw.weights, raw.weights + raw.count);
  header.first_copy_wrong = std::move(wrong);
  return header;
}

}  // namespace tierflow::io

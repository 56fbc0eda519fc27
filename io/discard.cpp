#include "io/discard.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "io/buffer.h"
#include "io/file.h"
#include "io/filesystem.h"
#include "io/member.h"

namespace tierflow::io {
namespace {

// The data files that are there.
Result<std::vector<File>> files_of(const VolumeOptions& options) {
  std::vector<File> files;
  for (const std::filesystem::path& directory : options.folders) {
    Result<File> file =
        File::open(directory / (options.name + ".tfv"),
                   {.allow_buffered = true, .allow_any_filesystem = true, .read_only = options.read_only});
    if (file)
      files.push_back(std::move(file).value());
    else if (file.error().error_number != ENOENT)
      return file.error();
  }
  return files;
}

Result<bool> holds_zeros(const File& file, std::uint64_t offset) {
  Result<std::uint64_t> size = file.size();
  if (!size) return size.error();
  Buffer block = allocate_buffer(std::max<std::size_t>(4096, file.alignment()));
  if (!block) return Error{.kind = ErrorKind::memory, .operation = "allocate", .length = 4096};
  if (*size < offset + block.size()) return offset != 0 || *size == 0;  // other short files are nobody's volume
  if (Error error = file.read(offset, block.data(), block.size())) return error;
  return std::all_of(block.data(), block.data() + block.size(), [](std::byte each) { return each == std::byte{}; });
}

}  // namespace

Error discard(const VolumeOptions& options) {
  Result<std::vector<File>> files = files_of(options);
  if (!files) return files.error();
  for (const File& file : *files) {
    file.remove();
    if (access(file.path().c_str(), F_OK) == 0)
      return Error{.kind = ErrorKind::environment,
                   .operation = "remove",
                   .path = file.path(),
                   .detail = "it stays there: the folder must be one that can be written"};
    if (Error error = sync_directory(std::filesystem::path(file.path()).parent_path())) return error;
  }
  return {};
}

Result<bool> creation_was_interrupted(const VolumeOptions& options) {
  Result<std::vector<File>> files = files_of(options);
  if (!files) return files.error();
  bool with_header = false, without = false;
  for (const File& file : *files) {
    bool zeros = true;
    for (const std::uint64_t copy : {std::uint64_t{0}, kSecondHeader}) {
      Result<bool> here = holds_zeros(file, copy);
      if (!here) return here.error();
      zeros = zeros && *here;
    }
    (zeros ? without : with_header) = true;
  }
  return without && (!with_header || files->size() == options.folders.size());
}

Result<std::optional<Membership>> membership(const VolumeOptions& options, const std::filesystem::path& folder) {
  Result<File> file = File::open(folder / (options.name + ".tfv"),
                                 {.allow_buffered = true, .allow_any_filesystem = true, .read_only = true});
  if (!file && file.error().kind == ErrorKind::locked) return file.error();
  if (!file) return std::optional<Membership>();
  Result<MemberHeader> header = MemberHeader::read(*file);
  if (!header) return std::optional<Membership>();
  return std::optional<Membership>(
      {.volume = header->volume_id, .count = static_cast<std::uint32_t>(header->weights.size())});
}

}  // namespace tierflow::io

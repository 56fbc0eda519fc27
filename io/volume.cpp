#include "io/volume.h"

#include <sys/random.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <map>
#include <optional>

#include "io/bench.h"
#include "io/filesystem.h"
#include "io/member.h"
#include "io/volume_core.h"

namespace tierflow::io {
namespace {

namespace fs = std::filesystem;

Error usage(std::string detail) {
  return Error{.kind = ErrorKind::usage, .operation = "volume", .detail = std::move(detail)};
}

Error check(const VolumeOptions& options, bool creating) {
  if (options.folders.empty()) return usage("name at least one directory");
  if (options.folders.size() > kMostMembers) return usage("at most " + std::to_string(kMostMembers) + " folders");
  if (options.name.empty() || options.name.find('/') != std::string::npos)
    return usage("the name must be a plain file name");
  if (options.block < 4096 || options.block > (std::size_t{1} << 30) || options.block % 4096 != 0) {
    return usage("the block must be a multiple of 4096, at most 1 GiB");
  }
  if (options.depth < 1 || options.depth > 4096) return usage("the depth must be from 1 to 4096");
  if (creating && (options.bytes == 0 || options.bytes > (std::uint64_t{1} << 60)))
    return usage("the size is zero or absurd");
  if (!options.speeds.empty() && options.speeds.size() != options.folders.size()) {
    return usage("as many speeds as folders, or none");
  }
  for (double speed : options.speeds) {
    if (!(speed > 0) || speed > 1e30) return usage("speeds must be positive");
  }
  return {};
}

fs::path data_path(const VolumeOptions& options, const fs::path& directory) {
  return directory / (options.name + ".tfv");
}

// What create() has made so far; undone unless kept.
class Undo {
 public:
  ~Undo() {
    if (kept_) return;
    for (const Member& member : members) member.file.remove();
    std::error_code ignored;
    for (auto it = folders.rbegin(); it != folders.rend(); ++it) fs::remove(*it, ignored);
  }
  void keep() { kept_ = true; }

  std::vector<Member> members;
  std::vector<fs::path> folders;

 private:
  bool kept_ = false;
};

Error make_directory(const fs::path& directory, std::vector<fs::path>& made) {
  std::vector<fs::path> missing;
  std::error_code code;
  for (fs::path path = fs::absolute(directory, code).lexically_normal(); !path.empty() && !fs::exists(path, code);
       path = path.parent_path()) {
    if (path.has_filename()) missing.push_back(path);
    if (path == path.parent_path()) break;
  }
  for (auto it = missing.rbegin(); it != missing.rend(); ++it) {
    if (!fs::create_directory(*it, code) && code) {
      return Error{.kind = ErrorKind::environment,
                   .operation = "create directory",
                   .path = it->string(),
                   .error_number = code.value()};
    }
    made.push_back(*it);
  }
  return {};
}

// In whole MiB or GiB: what is needed rounded up, what is free rounded down.
std::string needed_and_free(std::uint64_t needed, std::uint64_t free) {
  const int shift = needed >> 34 == 0 ? 20 : 30;
  const char* unit = shift == 20 ? " MiB" : " GiB";
  const std::uint64_t whole = (needed + (std::uint64_t{1} << shift) - 1) >> shift;
  return std::to_string(needed) + " bytes needed (" + std::to_string(whole) + unit + "), " + std::to_string(free) +
         " free (" + std::to_string(free >> shift) + unit + ")";
}

// The space that the members need together must be there on each drive, also where several folders share one.
Error check_space(const std::vector<Member>& members) {
  std::map<dev_t, std::uint64_t> needed;
  for (const Member& member : members) needed[member.file.device()] += member.file_bytes;
  for (const Member& member : members) {
    struct statvfs info;
    if (statvfs(member.directory.c_str(), &info) != 0) continue;  // the reservation itself will tell
    const std::uint64_t free = static_cast<std::uint64_t>(info.f_bavail) * info.f_frsize;
    const std::uint64_t wanted = needed[member.file.device()];
    // A file system in RAM may report no size at all.
    if (info.f_blocks == 0 || wanted <= free) continue;
    return Error{.kind = ErrorKind::environment,
                 .operation = "create",
                 .path = member.file.path(),
                 .error_number = ENOSPC,
                 .detail = needed_and_free(wanted, free)};
  }
  return {};
}

bool on_several_drives(const std::vector<Member>& members) {
  return std::any_of(members.begin(), members.end(),
                     [&](const Member& member) { return member.file.device() != members.front().file.device(); });
}

Error largest_alignment(const std::vector<Member>& members, std::uint64_t unit, std::size_t& alignment) {
  alignment = 4096;
  for (const Member& member : members) alignment = std::max(alignment, member.file.alignment());
  if (unit % alignment == 0) return {};
  return usage("the block must be a multiple of " + std::to_string(alignment) + " on these drives");
}

}  // namespace

Result<std::unique_ptr<Volume>> Volume::create(const VolumeOptions& options) {
  if (Error error = check(options, true)) return error;
  const FilePolicy policy{.allow_buffered = options.allow_buffered,
                          .allow_any_filesystem = options.allow_any_filesystem};
  Undo undo;
  for (const fs::path& directory : options.folders) {
    if (Error error = make_directory(directory, undo.folders)) return error;
    Result<File> file = File::create(data_path(options, directory), policy);
    if (!file) return file.error();
    undo.members.push_back(Member{.file = std::move(file).value(), .directory = directory});
  }
  std::size_t alignment;
  if (Error error = largest_alignment(undo.members, options.block, alignment)) return error;

  std::vector<std::uint32_t> weights(undo.members.size(), 1);
  if (!options.speeds.empty()) {
    weights = weights_for(options.speeds);
  } else if (options.measure_speeds && on_several_drives(undo.members)) {
    Result<std::vector<double>> speeds = io::measure_speeds(options);
    if (!speeds) return speeds.error();
    weights = weights_for(*speeds);
  }
  Layout layout((options.bytes + alignment - 1) / alignment * alignment, options.block, weights);

  MemberHeader header{.volume_bytes = layout.bytes(), .stripe_unit = layout.unit(), .weights = weights};
  if (getrandom(header.volume_id.data(), sizeof header.volume_id, 0) != sizeof header.volume_id) {
    return Error{.kind = ErrorKind::environment, .operation = "getrandom", .error_number = errno};
  }
  for (std::uint32_t index = 0; index < undo.members.size(); ++index) {
    undo.members[index].data_start = header.data_start;
    undo.members[index].file_bytes = header.data_start + layout.member_bytes(index);
  }
  if (Error error = check_space(undo.members)) return error;
  std::vector<std::string> warnings;
  for (Member& member : undo.members) {
    Result<bool> reserved = member.file.preallocate(member.file_bytes);
    if (!reserved) {
      Error error = reserved.error();
      struct statvfs info;
      if (error.error_number == ENOSPC && statvfs(member.directory.c_str(), &info) == 0)
        error.detail = needed_and_free(member.file_bytes, static_cast<std::uint64_t>(info.f_bavail) * info.f_frsize);
      return error;
    }
    if (!*reserved) {
      warnings.push_back(
          member.directory.string() +
          ": the file system cannot reserve space, a full drive would end the run; name a folder on ext4 or xfs "
          "with --storage");
    }
  }
  for (std::uint32_t index = 0; index < undo.members.size(); ++index) {
    const Member& member = undo.members[index];
    header.index = index;
    header.data_bytes = layout.member_bytes(index);
    if (Error error = header.write(member.file)) return error;
    if (Error error = member.file.sync()) return error;
    if (Error error = sync_directory(member.directory)) return error;
  }
  for (const fs::path& directory : undo.folders) {
    if (Error error = sync_directory(directory.parent_path())) return error;
  }
  auto core = std::make_unique<VolumeCore>(std::move(undo.members), std::move(layout), options, std::move(warnings),
                                           undo.folders);
  if (Error error = core->start(true)) {
    core->remove_files();
    return error;
  }
  undo.keep();
  return std::unique_ptr<Volume>(std::move(core));
}

Result<std::unique_ptr<Volume>> Volume::open(const VolumeOptions& options) {
  if (Error error = check(options, false)) return error;
  const FilePolicy policy{.allow_buffered = options.allow_buffered,
                          .allow_any_filesystem = options.allow_any_filesystem,
                          .read_only = options.read_only,
                          .beside_owner = options.beside_owner};
  std::vector<std::optional<Member>> found(options.folders.size());
  std::optional<MemberHeader> first;
  std::vector<std::string> warnings;
  for (const fs::path& directory : options.folders) {
    Result<File> file = File::open(data_path(options, directory), policy);
    if (!file) return file.error();
    Result<MemberHeader> header = MemberHeader::read(*file);
    if (!header) return header.error();
    if (!header->first_copy_wrong.empty())
      warnings.push_back(header->first_copy_wrong + "; its second header is whole and is used");
    if (!first) first = *header;
    std::string mismatch;
    if (header->volume_id != first->volume_id || header->weights != first->weights ||
        header->volume_bytes != first->volume_bytes || header->stripe_unit != first->stripe_unit) {
      mismatch = "it belongs to another volume than " + data_path(options, options.folders.front()).string();
    } else if (header->weights.size() != found.size()) {
      mismatch = "the volume has " + std::to_string(header->weights.size()) + " folders, " +
                 std::to_string(found.size()) + " were named";
    } else if (found[header->index]) {
      mismatch = "part " + std::to_string(header->index) + " of the volume is here twice";
    }
    if (!mismatch.empty()) {
      return Error{.kind = ErrorKind::input, .operation = "open", .path = file->path(), .detail = mismatch};
    }
    found[header->index] = Member{.file = std::move(file).value(),
                                  .directory = directory,
                                  .data_start = header->data_start,
                                  .file_bytes = header->data_start + header->data_bytes};
  }
  Layout layout(first->volume_bytes, first->stripe_unit, first->weights);
  std::vector<Member> members;
  for (std::uint32_t index = 0; index < found.size(); ++index) {
    if (found[index]->file_bytes - found[index]->data_start != layout.member_bytes(index)) {
      return Error{.kind = ErrorKind::input,
                   .operation = "open",
                   .path = found[index]->file.path(),
                   .detail = "its header contradicts the volume's size"};
    }
    members.push_back(std::move(*found[index]));
  }
  std::size_t alignment;
  if (Error error = largest_alignment(members, options.block, alignment)) return error;
  auto core = std::make_unique<VolumeCore>(std::move(members), std::move(layout), options, std::move(warnings),
                                           std::vector<fs::path>{});
  if (Error error = core->start(false)) return error;
  return std::unique_ptr<Volume>(std::move(core));
}

}  // namespace tierflow::io

#include "io/filesystem.h"

#include <fcntl.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <string_view>

#include "io/descriptor.h"

namespace tierflow::io {
namespace {

struct KnownFilesystem {
  std::uint32_t magic;
  std::string_view name;
  std::string_view why;
  std::string_view where = "";  // a better folder is found
};
constexpr std::string_view kRam = "it lives in RAM, where the state would defeat the purpose of storing it";
constexpr std::string_view kRemote = "it is not a local drive";
constexpr std::string_view kLayer = "it hides the drive behind another layer";
constexpr std::string_view kWsl =
    " (under WSL2 one of Linux' own file system, such as ~/tierflow, and none of a Windows drive, such as /mnt/c)";
constexpr std::string_view kDocker =
    " (in a container a folder of the host: docker run -v /data/tierflow:/state, then --storage /state)";
constexpr std::array kRefused = {
    KnownFilesystem{0x01021994, "tmpfs", kRam},     KnownFilesystem{0x858458F6, "ramfs", kRam},
    KnownFilesystem{0x958458F6, "hugetlbfs", kRam}, KnownFilesystem{0x6969, "NFS", kRemote},
    KnownFilesystem{0xFF534D42, "CIFS", kRemote},   KnownFilesystem{0xFE534D42, "SMB2", kRemote},
    KnownFilesystem{0x517B, "SMB", kRemote},        KnownFilesystem{0x00C36400, "Ceph", kRemote},
    KnownFilesystem{0x5346414F, "AFS", kRemote},    KnownFilesystem{0x01021997, "9p", kRemote, kWsl},
    KnownFilesystem{0x0BD00BD0, "Lustre", kRemote}, KnownFilesystem{0x47504653, "GPFS", kRemote},
    KnownFilesystem{0x65735546, "FUSE", kLayer},    KnownFilesystem{0x794C7630, "overlay", kLayer, kDocker}};

constexpr std::uint32_t kBtrfs = 0x9123683E, kZfs = 0x2FC12FC1, kExfat = 0x2011BAB0, kFat = 0x4D44;

Error make_error(ErrorKind kind, const char* operation, const std::filesystem::path& path, int error_number,
                 std::string detail = {}) {
  return Error{.kind = kind,
               .operation = operation,
               .path = path.string(),
               .error_number = error_number,
               .detail = std::move(detail)};
}

}  // namespace

Error check_filesystem(const std::filesystem::path& directory) {
  struct statfs info;
  if (statfs(directory.c_str(), &info) != 0) {
    const int number = errno;
    return make_error(number == ENOENT ? ErrorKind::input : ErrorKind::environment, "statfs", directory, number);
  }
  return check_filesystem_type(static_cast<std::uint32_t>(info.f_type), directory);
}

Error check_filesystem_type(std::uint32_t type, const std::filesystem::path& directory) {
  for (const KnownFilesystem& known : kRefused) {
    if (type != known.magic) continue;
    return make_error(ErrorKind::environment, "open", directory, 0,
                      "the file system is " + std::string(known.name) + ": " + std::string(known.why) +
                          "; name a folder on a local drive with --storage" + std::string(known.where) +
                          ", or accept this one with --allow-any-filesystem");
  }
  return {};
}

std::string filesystem_remark(std::uint32_t type) {
  constexpr const char* kBetter = "; name a folder on ext4 or xfs with --storage";
  if (type == kZfs) {
    return std::string(
               "ZFS reserves no space, so a full pool would end the run, and may keep what passes through "
               "O_DIRECT in memory") +
           kBetter;
  }
  if (type == kExfat || type == kFat) {
    return std::string("exFAT and FAT have no journal and no permissions: after a power cut the state may be lost") +
           kBetter;
  }
  return {};
}

bool copies_on_write(std::uint32_t type) {
  return type == kBtrfs;
}

Error sync_directory(const std::filesystem::path& directory) {
  const Descriptor descriptor(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!descriptor) return make_error(ErrorKind::environment, "open", directory, errno);
  const int status = fsync(descriptor.fd()) == 0 ? 0 : errno;
  // Some file systems cannot flush a folder, and each says so in its own way; there is nothing better to do then.
  for (const int cannot : {EINVAL, ENOTSUP, ENOSYS, EBADF}) {
    if (status == cannot) return {};
  }
  if (status != 0) return make_error(ErrorKind::io, "flush", directory, status, advice(status));
  return {};
}

}  // namespace tierflow::io

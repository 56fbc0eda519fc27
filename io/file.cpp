#include "io/file.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <thread>

#include "io/filesystem.h"
#include "io/fork_guard.h"
#include "io/lock_holder.h"

namespace tierflow::io {
namespace {

constexpr std::size_t kPage = 4096;
// Who reads a state is soon done, and so are the last requests of a process that was killed.
constexpr std::chrono::seconds kLockPatience{5};

Error make_error(ErrorKind kind, const char* operation, std::string path, int error_number, std::string detail = {}) {
  return Error{.kind = kind,
               .operation = operation,
               .path = std::move(path),
               .error_number = error_number,
               .detail = std::move(detail)};
}

}  // namespace

FileSizeSignalGuard::FileSizeSignalGuard() {
  sigset_t set, old;
  sigemptyset(&set);
  sigaddset(&set, SIGXFSZ);
  pthread_sigmask(SIG_BLOCK, &set, &old);
  was_blocked_ = sigismember(&old, SIGXFSZ) == 1;
}

FileSizeSignalGuard::~FileSizeSignalGuard() {
  if (was_blocked_) return;
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGXFSZ);
  timespec none{};
  while (sigtimedwait(&set, nullptr, &none) > 0) {
  }
  pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
}

File::~File() {
  if (!descriptor_) return;
  // Closing alone would not do: a ring that had the file registered lets go of it some time after it was closed itself.
  flock(descriptor_.fd(), LOCK_UN);
  no_longer_kept(descriptor_.fd());
}

Error File::failed(const char* operation, ErrorKind kind, int error_number, std::string detail) const {
  if (detail.empty()) detail = advice(error_number);
  return make_error(kind, operation, path_, error_number, std::move(detail));
}

Result<File> File::open_with(const std::filesystem::path& path, int flags, const FilePolicy& policy) {
  if (!policy.allow_any_filesystem) {
    if (Error error = check_filesystem(path.parent_path())) return error;
  }
  const bool creating = (flags & O_CREAT) != 0;
  // O_NONBLOCK: a pipe planted under the name must not hang us.
  flags |= (policy.read_only ? O_RDONLY : O_RDWR) | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK;
  bool direct = true;
  int descriptor = ::open(path.c_str(), flags | O_DIRECT, 0600);
  if (descriptor < 0 && errno == EINVAL) {
    if (creating) unlink(path.c_str());  // some kernels leave the file behind when they refuse O_DIRECT
    if (!policy.allow_buffered) {
      return make_error(
          ErrorKind::environment, "open", path.string(), EINVAL,
          "the file system refuses O_DIRECT; name a folder on ext4 or xfs with --storage, or go through the page "
          "cache with --allow-buffered");
    }
    direct = false;
    descriptor = ::open(path.c_str(), flags, 0600);
  }
  if (descriptor < 0) {
    const int number = errno;
    std::string detail;
    if (number == EEXIST) detail = "remove it first, or open it";
    if (number == ELOOP) detail = "it is a symbolic link, which is not followed";
    const bool absent = number == ENOENT || number == ELOOP;
    return make_error(absent ? ErrorKind::input : ErrorKind::environment, creating ? "create" : "open", path.string(),
                      number, detail);
  }
  File file(Descriptor(descriptor), path.string());
  keep_from_children(descriptor);
  file.direct_ = direct;
  if (Error error = file.inspect()) {
    if (creating) unlink(path.c_str());  // remove() goes by what inspect() finds
    return error;
  }
  if (!file.direct_ && direct && !policy.allow_buffered) {
    if (creating) file.remove();
    return file.failed(
        "open", ErrorKind::environment, EINVAL,
        "direct I/O is not possible on this file; name another folder with --storage, or go through the page cache "
        "with --allow-buffered");
  }
  if (policy.read_only && policy.beside_owner) return file;
  if (Error error = file.lock(policy.read_only)) {
    if (creating) file.remove();
    return error;
  }
  return file;
}

Result<File> File::create(const std::filesystem::path& path, const FilePolicy& policy) {
  Result<File> file = open_with(path, O_CREAT | O_EXCL, policy);
  if (!file && file.error().error_number == EEXIST) {
    // Whose is it? Nobody should be told to remove the file of a run that is going on.
    Result<File> other = open(path, policy);
    if (!other && other.error().kind == ErrorKind::locked) return other;
  }
  if (!file) return file;
  file->claim();
  return file;
}

Result<File> File::open(const std::filesystem::path& path, const FilePolicy& policy) {
  return open_with(path, 0, policy);
}

// What the file system refuses here costs the user something, and no more: it is said.
void File::claim() {
  struct stat info;
  if (fchmod(descriptor_.fd(), 0600) != 0 || fstat(descriptor_.fd(), &info) != 0 || (info.st_mode & 077) != 0) {
    warnings_.push_back(path_ +
                        ": the file system does not keep permissions, so other users may reach the state; name a "
                        "folder on ext4 or xfs with --storage, or mount this one with umask=077");
  }
  struct statfs system;
  if (fstatfs(descriptor_.fd(), &system) != 0 || !copies_on_write(static_cast<std::uint32_t>(system.f_type))) return;
  // Copy on write would turn each overwrite of reserved space into a new allocation.
  int flags = 0;
  if (ioctl(descriptor_.fd(), FS_IOC_GETFLAGS, &flags) == 0) {
    flags |= FS_NOCOW_FL;
    if (ioctl(descriptor_.fd(), FS_IOC_SETFLAGS, &flags) == 0) return;
  }
  warnings_.push_back(path_ +
                      ": copy on write cannot be turned off, so overwriting takes new space and a full drive would end "
                      "the run; run chattr +C on the empty folder, or name one on ext4 or xfs with --storage");
}

Error File::inspect() {
  struct stat info;
  if (fstat(descriptor_.fd(), &info) != 0) return failed("stat", ErrorKind::io, errno);
  if (!S_ISREG(info.st_mode)) return failed("open", ErrorKind::environment, 0, "it is not a regular file");
  if (info.st_uid != geteuid()) return failed("open", ErrorKind::environment, 0, "it belongs to another user");
  if ((info.st_mode & 077) != 0 && info.st_size != 0) {
    return failed("open", ErrorKind::environment, 0,
                  "other users may reach it; if you trust its content, run chmod 600 on it or, where the file system "
                  "keeps no permissions, mount it with umask=077");
  }
  if (info.st_nlink > 1) return failed("open", ErrorKind::environment, 0, "the file has a second name (hard link)");
  device_ = info.st_dev;
  inode_ = info.st_ino;
  struct statfs system;
  if (fstatfs(descriptor_.fd(), &system) == 0) {
    const std::string remark = filesystem_remark(static_cast<std::uint32_t>(system.f_type));
    if (!remark.empty()) warnings_.push_back(path_ + ": " + remark);
  }

  std::size_t reported = kPage;
#ifdef STATX_DIOALIGN
  struct statx extended {};
  if (statx(descriptor_.fd(), "", AT_EMPTY_PATH, STATX_DIOALIGN, &extended) == 0 &&
      (extended.stx_mask & STATX_DIOALIGN) != 0) {
    if (extended.stx_dio_offset_align == 0 && direct_) {
      direct_ = false;
      if (fcntl(descriptor_.fd(), F_SETFL, fcntl(descriptor_.fd(), F_GETFL) & ~O_DIRECT) != 0)
        return failed("open", ErrorKind::io, errno);
    }
    reported = std::max<std::size_t>(extended.stx_dio_offset_align, extended.stx_dio_mem_align);
  }
#endif
  // Never below a page: a volume keeps its layout when it moves to a drive with larger sectors.
  while (alignment_ < reported) alignment_ *= 2;
  return {};
}

Error File::lock(bool shared) {
  const auto deadline = std::chrono::steady_clock::now() + kLockPatience;
  while (flock(descriptor_.fd(), (shared ? LOCK_SH : LOCK_EX) | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return failed("lock", ErrorKind::environment, errno);
    const LockHolder holder = lock_holder(descriptor_.fd());
    // Nobody: who held it has let go since; or has ended, of which a container is not told; or lives elsewhere.
    const bool again = holder.shared || holder.ended || holder.process == 0;
    if (again && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      continue;
    }
    if (holder.process <= 0) return failed("lock", ErrorKind::locked, 0, "another process holds it");
    std::string who = "process " + std::to_string(holder.process) + (holder.shared ? " reads it" : " holds it");
    if (holder.ended) who += "; it has ended, but its last requests are still at the drive: try again soon";
    return failed("lock", ErrorKind::locked, 0, who);
  }
  return {};
}

int reserve_space(int descriptor, std::uint64_t bytes) {
  const FileSizeSignalGuard guard;
  int status;
  do {
    status = fallocate(descriptor, 0, 0, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
  } while (status == EINTR);
  return status;
}

Result<bool> File::preallocate(std::uint64_t bytes) {
  const FileSizeSignalGuard guard;
  int status = reserve_space(descriptor_.fd(), bytes);
  if (status == 0) return true;
  if (status == EOPNOTSUPP || status == ENOSYS) {
    if (ftruncate(descriptor_.fd(), static_cast<off_t>(bytes)) == 0) return false;
    status = errno;
  }
  Error error = failed("preallocate", ErrorKind::environment, status);
  error.length = bytes;
  if (status == EFBIG) error.detail = "the file size limit (ulimit -f) or the file system's is smaller";
  return error;
}

Result<std::uint64_t> File::size() const {
  struct stat info;
  if (fstat(descriptor_.fd(), &info) != 0) return failed("stat", ErrorKind::io, errno);
  return static_cast<std::uint64_t>(info.st_size);
}

Error File::transferred(const char* operation, const Moved& moved, std::uint64_t offset, std::size_t length) const {
  if (moved.bytes == length) return {};
  const bool ended = moved.error_number == 0;
  Error error = failed(operation, ended ? ErrorKind::corruption : ErrorKind::io, moved.error_number,
                       ended ? "the file ends too early" : "");
  error.offset = offset;
  error.length = length;
  return error;
}

Error File::read(std::uint64_t offset, std::byte* data, std::size_t length) const {
  return transferred("read", read_all(descriptor_.fd(), offset, {data, length}), offset, length);
}

Error File::write(std::uint64_t offset, const std::byte* data, std::size_t length) const {
  FileSizeSignalGuard guard;
  return transferred("write", write_all(descriptor_.fd(), offset, {data, length}), offset, length);
}

Error File::sync() const {
  if (fsync(descriptor_.fd()) == 0) return {};
  return failed("flush", ErrorKind::io, errno);
}

Error File::check_in_place(std::uint64_t expected_bytes) const {
  struct stat held, named;
  if (fstat(descriptor_.fd(), &held) != 0) return failed("stat", ErrorKind::io, errno);
  if (lstat(path_.c_str(), &named) != 0 || named.st_ino != held.st_ino || named.st_dev != held.st_dev) {
    return failed("check", ErrorKind::corruption, 0, "the data file was deleted, renamed or replaced while in use");
  }
  if (static_cast<std::uint64_t>(held.st_size) != expected_bytes) {
    return failed(
        "check", ErrorKind::corruption, 0,
        "the data file has " + std::to_string(held.st_size) + " bytes and must have " + std::to_string(expected_bytes));
  }
  return {};
}

void File::remove() const {
  struct stat named;
  if (lstat(path_.c_str(), &named) == 0 && named.st_ino == inode_ && named.st_dev == device_) unlink(path_.c_str());
}

}  // namespace tierflow::io

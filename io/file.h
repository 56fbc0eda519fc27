#pragma once
// A data file of a volume: opened for direct I/O if the file system allows it, private to its owner, locked, never a
// link.
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "io/descriptor.h"
#include "io/error.h"

namespace tierflow::io {

struct FilePolicy {
  bool allow_buffered = false;        // open without O_DIRECT if it is refused
  bool allow_any_filesystem = false;  // accept file systems in RAM or on another machine
  bool read_only = false;             // only for open(): for reading, while others may read too
  bool beside_owner = false;          // with read_only: without a lock, also while another process writes
};

// Owns one descriptor and the lock on it. The lock belongs to the descriptor that does the I/O. So the kernel holds it
// until the last request of a killed process has ended, and that process cannot overwrite what the next owner writes. A
// forked child has neither descriptor nor lock.
class File {
 public:
  // A new file, mode 0600 whatever the umask. EEXIST if the name is taken, even by a link; an error of kind locked if
  // another process holds the file of that name.
  static Result<File> create(const std::filesystem::path& path, const FilePolicy& policy);
  // Opens an existing regular file that belongs to this user and that nobody else may access; anything else is refused.
  static Result<File> open(const std::filesystem::path& path, const FilePolicy& policy);

  File(File&&) noexcept = default;
  File& operator=(File&&) noexcept = default;
  ~File();

  int descriptor() const { return descriptor_.fd(); }
  bool direct() const { return direct_; }
  std::size_t alignment() const { return alignment_; }  // of offsets, lengths and addresses; a power of two
  const std::string& path() const { return path_; }
  dev_t device() const { return device_; }
  // What the file system cannot do for this file: one line each, with the remedy.
  const std::vector<std::string>& warnings() const { return warnings_; }

  // Reserves the space on the drive, so that no later write can find the drive full. The value is false if the file
  // system cannot reserve space; the file then still has its size.
  Result<bool> preallocate(std::uint64_t bytes);
  Result<std::uint64_t> size() const;

  // Small blocking transfers of whole aligned blocks, for headers.
  Error read(std::uint64_t offset, std::byte* data, std::size_t length) const;
  Error write(std::uint64_t offset, const std::byte* data, std::size_t length) const;
  Error sync() const;

  // An error if the path no longer leads to this file, or if its size has changed.
  Error check_in_place(std::uint64_t expected_bytes) const;
  void remove() const;

 private:
  File(Descriptor descriptor, std::string path) : descriptor_(std::move(descriptor)), path_(std::move(path)) {}
  static Result<File> open_with(const std::filesystem::path& path, int flags, const FilePolicy& policy);
  void claim();
  Error inspect();
  Error lock(bool shared);
  Error transferred(const char* operation, const Moved& moved, std::uint64_t offset, std::size_t length) const;
  Error failed(const char* operation, ErrorKind kind, int error_number, std::string detail = {}) const;

  Descriptor descriptor_;
  bool direct_ = false;
  std::size_t alignment_ = 4096;
  dev_t device_ = 0;
  ino_t inode_ = 0;
  std::string path_;
  std::vector<std::string> warnings_;
};

// While it lives, writing beyond RLIMIT_FSIZE in this thread gives the error EFBIG, not a signal that ends the process.
class FileSizeSignalGuard {
 public:
  FileSizeSignalGuard();
  ~FileSizeSignalGuard();
  FileSizeSignalGuard(const FileSizeSignalGuard&) = delete;
  FileSizeSignalGuard& operator=(const FileSizeSignalGuard&) = delete;

 private:
  bool was_blocked_ = false;
};

// Reserves space on the drive for the first `bytes` bytes of a file, which is as long then. Returns 0 or an errno:
// EOPNOTSUPP or ENOSYS if the file system reserves nothing.
int reserve_space(int descriptor, std::uint64_t bytes);

}  // namespace tierflow::io

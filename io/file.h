#pragma once
// A data file as io wants it: opened for direct I/O where the file system allows, private to its owner, locked, never a
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
  bool allow_buffered = false;        // go on without O_DIRECT where it is refused
  bool allow_any_filesystem = false;  // accept file systems in RAM or on another machine
  bool read_only = false;             // open() alone: for reading, beside others who read
  bool beside_owner = false;          // with read_only: without a lock, also while another process writes
};

// Owns one descriptor and the lock on it. The lock belongs to the descriptor that does the I/O: the kernel holds it
// until the last request of a killed process has left the drive, so the next owner cannot be overwritten by the dead. A
// forked child has neither.
class File {
 public:
  // A new file, mode 0600 whatever the umask. EEXIST where the name is taken, by a link too; an error of kind
  // locked where another process holds the file of that name.
  static Result<File> create(const std::filesystem::path& path, const FilePolicy& policy);
  // An existing regular file of ours that nobody else may touch; anything else is refused.
  static Result<File> open(const std::filesystem::path& path, const FilePolicy& policy);

  File(File&&) noexcept = default;
  File& operator=(File&&) noexcept = default;
  ~File();

  int descriptor() const { return descriptor_.fd(); }
  bool direct() const { return direct_; }
  std::size_t alignment() const { return alignment_; }  // of offsets, lengths and addresses; a power of two
  const std::string& path() const { return path_; }
  dev_t device() const { return device_; }
  // What the file system does not do for this file, one line each with the remedy.
  const std::vector<std::string>& warnings() const { return warnings_; }

  // Reserves the space on the drive, so that no later write can meet a full disk. The value is false where the file
  // system cannot reserve space; the file still has its size then.
  Result<bool> preallocate(std::uint64_t bytes);
  Result<std::uint64_t> size() const;

  // Small blocking transfers of whole aligned blocks, for headers.
  Error read(std::uint64_t offset, std::byte* data, std::size_t length) const;
  Error write(std::uint64_t offset, const std::byte* data, std::size_t length) const;
  Error sync() const;

  // Whether the path still leads to this very file.
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

// While it lives, writing beyond RLIMIT_FSIZE in this thread is the error EFBIG and not a signal that ends the process.
class FileSizeSignalGuard {
 public:
  FileSizeSignalGuard();
  ~FileSizeSignalGuard();
  FileSizeSignalGuard(const FileSizeSignalGuard&) = delete;
  FileSizeSignalGuard& operator=(const FileSizeSignalGuard&) = delete;

 private:
  bool was_blocked_ = false;
};

}  // namespace tierflow::io

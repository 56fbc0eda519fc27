#pragma once
// A file descriptor that closes itself, and blocking transfers that move everything or return why not.
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>

namespace tierflow::io {

// Owns a descriptor; a negative number means that it owns none.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor();
  int fd() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

struct Moved {
  std::size_t bytes = 0;
  int error_number = 0;  // of the call that failed; 0 with fewer bytes than asked for: the file ended
};

// A signal does not end a transfer, and a short transfer is continued.
Moved read_all(int fd, std::uint64_t offset, std::span<std::byte> out);
// Without `offset` it writes at the descriptor's own position. A system call that writes nothing counts as ENOSPC.
Moved write_all(int fd, std::optional<std::uint64_t> offset, std::span<const std::byte> bytes);

}  // namespace tierflow::io

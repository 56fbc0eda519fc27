#include "io/descriptor.h"

#include <unistd.h>

#include <cerrno>

namespace tierflow::io {
namespace {

// transfer(done): what pread or pwrite returns for the rest. at_end: the error that no byte moved means.
template <class Transfer>
Moved move_all(std::size_t length, int at_end, Transfer transfer) {
  Moved moved;
  while (moved.bytes < length) {
    const ssize_t now = transfer(moved.bytes);
    if (now < 0 && errno == EINTR) continue;
    if (now <= 0) {
      moved.error_number = now < 0 ? errno : at_end;
      break;
    }
    moved.bytes += static_cast<std::size_t>(now);
  }
  return moved;
}

}  // namespace

Descriptor::~Descriptor() {
  if (fd_ >= 0) close(fd_);
}

Moved read_all(int fd, std::uint64_t offset, std::span<std::byte> out) {
  return move_all(out.size(), 0, [&](std::size_t done) {
    return pread(fd, out.data() + done, out.size() - done, static_cast<off_t>(offset + done));
  });
}

Moved write_all(int fd, std::optional<std::uint64_t> offset, std::span<const std::byte> bytes) {
  return move_all(bytes.size(), ENOSPC, [&](std::size_t done) {
    const std::span<const std::byte> rest = bytes.subspan(done);
    return offset ? pwrite(fd, rest.data(), rest.size(), static_cast<off_t>(*offset + done))
                  : write(fd, rest.data(), rest.size());
  });
}

}  // namespace tierflow::io

#pragma once
// The host budget as one slab: page aligned, allocated once, and pinned for fast copies. Everything on the host is a
// buffer in it. Buffers lie one after the other without gaps, so that the slab is as large as their sum. Registrations
// of at most 1 GiB end where buffers end (registrations_for in pinning.h).
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "io/buffer.h"
#include "io/error.h"
#include "swap/device.h"

namespace tierflow::swap {

class HostMemory {
 public:
  // buffers: their sizes, multiples of kSector.
  static io::Result<std::unique_ptr<HostMemory>> create(std::span<const std::size_t> buffers, Device& device);
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  std::span<std::byte> buffer(std::size_t index) const {
    return slab_->bytes().subspan(begins_[index], begins_[index + 1] - begins_[index]);
  }
  // All of the slab, cut into registrations.
  const std::vector<std::span<std::byte>>& registrations() const { return registrations_; }
  // A buffer as an io::Request takes it. As long as it lives, so does the whole slab, even if the HostMemory is gone.
  io::Buffer lend(std::span<std::byte> buffer) const { return io::part_of(slab_, buffer); }
  const std::shared_ptr<const io::Buffer>& slab() const { return slab_; }
  // Why the device could not pin all of the slab; empty if it could.
  const std::string& pin_note() const { return pin_note_; }

 private:
  HostMemory(io::Buffer slab, std::span<const std::size_t> buffers, Device& device);
  std::shared_ptr<const io::Buffer> slab_;
  std::vector<std::size_t> begins_;  // of the buffers, and the end
  std::vector<std::span<std::byte>> registrations_;
  Device& device_;
  std::string pin_note_;
};

}  // namespace tierflow::swap

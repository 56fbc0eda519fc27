#pragma once
// The host budget as one slab: page aligned, allocated once, known to the device for fast copies; everything on the
// host is cut from it.
#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "io/buffer.h"
#include "io/error.h"
#include "swap/device.h"

namespace tierflow::swap {

class HostMemory {
 public:
  static io::Result<std::unique_ptr<HostMemory>> create(std::size_t bytes, Device& device);
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  // Bytes no one else has; empty where the slab is used up. No cut crosses a multiple of 1 GiB unless it is larger
  // itself, so that registrations of at most 1 GiB cover each.
  std::span<std::byte> cut(std::size_t bytes);
  std::span<std::byte> all() const { return slab_->bytes(); }
  // A cut as a request takes it: whoever holds the Buffer keeps the whole slab alive, also beyond the HostMemory.
  io::Buffer lend(std::span<std::byte> cut) const { return io::part_of(slab_, cut); }
  // Why the device could not pin the slab; empty where it could.
  const std::string& pin_note() const { return pin_note_; }

 private:
  HostMemory(io::Buffer slab, Device& device)
      : slab_(std::make_shared<const io::Buffer>(std::move(slab))), device_(device) {}
  std::shared_ptr<const io::Buffer> slab_;
  Device& device_;
  std::string pin_note_;
  std::size_t used_ = 0;
};

}  // namespace tierflow::swap

#include "swap/host_memory.h"

#include "swap/layout.h"
#include "swap/pinning.h"

namespace tierflow::swap {

io::Result<std::unique_ptr<HostMemory>> HostMemory::create(std::size_t bytes, Device& device) {
  // Room for the gaps that keep cuts inside registrations.
  io::Buffer slab = io::allocate_buffer(bytes);
  if (!slab && bytes != 0)
    return io::Error{.kind = io::ErrorKind::memory,
                     .operation = "allocate host memory",
                     .length = bytes,
                     .detail = "the system refused; a smaller --host-memory may fit"};
  std::unique_ptr<HostMemory> memory(new HostMemory(std::move(slab), device));
  if (bytes != 0) memory->pin_note_ = device.pin(memory->all());
  return memory;
}

HostMemory::~HostMemory() {
  if (*slab_) device_.unpin(all());
}

std::span<std::byte> HostMemory::cut(std::size_t bytes) {
  const std::size_t size = round_up(bytes, kSector);
  std::size_t begin = used_;
  if (size <= kRegistration && begin / kRegistration != (begin + size - 1) / kRegistration)
    begin = round_up(begin, kRegistration);
  if (size == 0 || begin + size > slab_->size()) return {};
  used_ = begin + size;
  return all().subspan(begin, bytes);
}

}  // namespace tierflow::swap

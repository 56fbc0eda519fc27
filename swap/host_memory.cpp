#include "swap/host_memory.h"

#include <numeric>

#include "swap/pinning.h"

namespace tierflow::swap {

io::Result<std::unique_ptr<HostMemory>> HostMemory::create(std::span<const std::size_t> buffers, Device& device) {
  const std::size_t bytes = std::accumulate(buffers.begin(), buffers.end(), std::size_t{0});
  io::Buffer slab = io::allocate_buffer_of_this_process(bytes);
  if (!slab && bytes != 0)
    return io::Error{.kind = io::ErrorKind::memory,
                     .operation = "allocate host memory",
                     .length = bytes,
                     .detail = "the system refused; a smaller --host-memory may fit"};
  return std::unique_ptr<HostMemory>(new HostMemory(std::move(slab), buffers, device));
}

HostMemory::HostMemory(io::Buffer slab, std::span<const std::size_t> buffers, Device& device)
    : slab_(std::make_shared<const io::Buffer>(std::move(slab))), begins_(1, 0), device_(device) {
  for (const std::size_t bytes : buffers) begins_.push_back(begins_.back() + bytes);
  std::size_t begin = 0;
  for (const std::size_t bytes : registrations_for(buffers)) {
    registrations_.push_back(slab_->bytes().subspan(begin, bytes));
    begin += bytes;
  }
  if (!registrations_.empty()) pin_note_ = device_.pin(registrations_);
}

HostMemory::~HostMemory() {
  if (!registrations_.empty()) device_.unpin(slab_->bytes());
}

}  // namespace tierflow::swap

#include "io/buffer.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>

namespace tierflow::io {
namespace {

constexpr std::size_t kPage = 4096, kHugePage = std::size_t{2} << 20;

void unmap(std::byte* data, std::size_t size, void*) noexcept {
  munmap(data, size);
}

// In a child the addresses may belong to something else by now.
void unmap_in_owner(std::byte* data, std::size_t size, void* owner) noexcept {
  if (reinterpret_cast<std::intptr_t>(owner) == getpid()) munmap(data, size);
}

void* map(std::size_t bytes) {
  if (bytes == 0) return nullptr;
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return nullptr;
  // Pinning is paid by the page; where the system has no huge pages this does nothing.
  if (bytes >= 4 * kHugePage) madvise(data, bytes, MADV_HUGEPAGE);
  return data;
}

}  // namespace

Buffer allocate_buffer(std::size_t bytes) {
  void* data = map(bytes);
  return data == nullptr ? Buffer() : Buffer(static_cast<std::byte*>(data), bytes, unmap, nullptr);
}

Buffer allocate_buffer_of_this_process(std::size_t bytes) {
  void* data = map(bytes);
  if (data == nullptr) return {};
  madvise(data, bytes, MADV_DONTFORK);
  return Buffer(static_cast<std::byte*>(data), bytes, unmap_in_owner,
                reinterpret_cast<void*>(static_cast<std::intptr_t>(getpid())));
}

std::vector<Buffer> allocate_buffers(std::size_t count, std::size_t bytes) {
  const std::size_t pages = (bytes + kPage - 1) / kPage * kPage;
  const auto slab = std::make_shared<const Buffer>(allocate_buffer(count * pages));
  std::vector<Buffer> parts;
  for (std::size_t i = 0; *slab && i < count; ++i)
    parts.push_back(part_of(slab, slab->bytes().subspan(i * pages, bytes)));
  return parts;
}

Buffer part_of(std::shared_ptr<const Buffer> slab, std::span<std::byte> part) {
  using Owner = std::shared_ptr<const Buffer>;
  return Buffer(
      part.data(), part.size(),
      [](std::byte*, std::size_t, void* owner) noexcept { delete static_cast<Owner*>(owner); },
      new Owner(std::move(slab)));
}

}  // namespace tierflow::io

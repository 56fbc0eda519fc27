#pragma once
// Move-only bytes. Whoever holds a Buffer owns its memory; a request in flight holds its Buffer, so that memory a
// device is still writing to cannot be freed or handed out again.
#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace tierflow::io {

class Buffer {
 public:
  // Called once with the memory when a Buffer that holds it is destroyed. Must not throw.
  using Release = void (*)(std::byte* data, std::size_t size, void* owner) noexcept;

  Buffer() = default;
  Buffer(std::byte* data, std::size_t size, Release release, void* owner)
      : data_(data), size_(size), release_(release), owner_(owner) {}
  Buffer(Buffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        size_(std::exchange(other.size_, 0)),
        release_(other.release_),
        owner_(other.owner_) {}
  Buffer& operator=(Buffer&& other) noexcept {
    if (this != &other) {
      reset();
      data_ = std::exchange(other.data_, nullptr);
      size_ = std::exchange(other.size_, 0);
      release_ = other.release_;
      owner_ = other.owner_;
    }
    return *this;
  }
  ~Buffer() { reset(); }

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  std::span<std::byte> bytes() const { return {data_, size_}; }
  explicit operator bool() const { return data_ != nullptr; }
  void reset() {
    if (data_ != nullptr && release_ != nullptr) release_(data_, size_, owner_);
    data_ = nullptr;
    size_ = 0;
  }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  Release release_ = nullptr;
  void* owner_ = nullptr;
};

// Page-aligned memory of its own (mmap), zeroed, freed with the Buffer; empty if the system refuses.
Buffer allocate_buffer(std::size_t bytes);

// The same, and a process that fork() makes does not get it: to write there is an error in the child, and destroying
// its copy of the Buffer does nothing. fork() would copy every page that a device has pinned, and where the system does
// not know of the device, the parent's next write would go to another page than the device reads.
Buffer allocate_buffer_of_this_process(std::size_t bytes);

// `count` Buffers of `bytes` each, page-aligned parts of one allocation: the kernel can give it huge pages, from which
// a drive reads several times as fast as from small ones. Empty where the system refuses.
std::vector<Buffer> allocate_buffers(std::size_t count, std::size_t bytes);

// A Buffer over a part of `slab`. The slab lives until the last such Buffer is destroyed. A drive that never answers
// keeps the Buffer of its request, and with it the memory.
Buffer part_of(std::shared_ptr<const Buffer> slab, std::span<std::byte> part);

}  // namespace tierflow::io

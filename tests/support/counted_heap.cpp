#include "tests/support/counted_heap.h"

#include <malloc.h>

#include <atomic>
#include <cstdlib>
#include <new>

namespace tierflow::testing {
namespace {

std::atomic<std::int64_t> used = 0, peak = 0;

void* count(void* block) {
  if (block == nullptr) throw std::bad_alloc();
  const std::int64_t now = used += static_cast<std::int64_t>(malloc_usable_size(block));
  for (std::int64_t most = peak; now > most && !peak.compare_exchange_weak(most, now);) {
  }
  return block;
}

void give_back(void* block) {
  used -= static_cast<std::int64_t>(malloc_usable_size(block));
  std::free(block);
}

}  // namespace

std::int64_t heap_used() {
  return used;
}
std::int64_t heap_peak() {
  return peak;
}
void reset_heap_peak() {
  peak = used.load();
}

}  // namespace tierflow::testing

using tierflow::testing::count;
using tierflow::testing::give_back;

// Every form: a sanitizer's library has forms of its own, which these would be mixed with.
void* operator new(std::size_t bytes) {
  return count(std::malloc(bytes == 0 ? 1 : bytes));
}
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  const auto each = static_cast<std::size_t>(alignment);
  return count(std::aligned_alloc(each, (bytes + each) / each * each));
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  try {
    return operator new(bytes);
  } catch (...) {
    return nullptr;
  }
}
void* operator new(std::size_t bytes, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  try {
    return operator new(bytes, alignment);
  } catch (...) {
    return nullptr;
  }
}
void* operator new[](std::size_t bytes) {
  return operator new(bytes);
}
void* operator new[](std::size_t bytes, std::align_val_t alignment) {
  return operator new(bytes, alignment);
}
void* operator new[](std::size_t bytes, const std::nothrow_t& none) noexcept {
  return operator new(bytes, none);
}
void* operator new[](std::size_t bytes, std::align_val_t alignment, const std::nothrow_t& none) noexcept {
  return operator new(bytes, alignment, none);
}
void operator delete(void* block) noexcept {
  give_back(block);
}
void operator delete(void* block, std::size_t) noexcept {
  give_back(block);
}
void operator delete(void* block, std::align_val_t) noexcept {
  give_back(block);
}
void operator delete(void* block, std::size_t, std::align_val_t) noexcept {
  give_back(block);
}
void operator delete(void* block, const std::nothrow_t&) noexcept {
  give_back(block);
}
void operator delete(void* block, std::align_val_t, const std::nothrow_t&) noexcept {
  give_back(block);
}
void operator delete[](void* block) noexcept {
  give_back(block);
}
void operator delete[](void* block, std::size_t) noexcept {
  give_back(block);
}
void operator delete[](void* block, std::align_val_t) noexcept {
  give_back(block);
}
void operator delete[](void* block, std::size_t, std::align_val_t) noexcept {
  give_back(block);
}
void operator delete[](void* block, const std::nothrow_t&) noexcept {
  give_back(block);
}
void operator delete[](void* block, std::align_val_t, const std::nothrow_t&) noexcept {
  give_back(block);
}

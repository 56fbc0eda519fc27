#pragma once
// Blocking calls over a Volume, and bytes that say where they belong.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>

#include "io/wait.h"
#include "tests/support/temp_dir.h"

namespace tierflow::io {

inline VolumeOptions options_in(const testing::TempDir& folder, std::uint64_t bytes) {
  VolumeOptions options;
  options.folders = {folder.path() / "drive"};
  options.bytes = bytes;
  options.allow_any_filesystem = true;  // the folder for tests may be anything
  options.allow_buffered = true;
  return options;
}

inline std::unique_ptr<Volume> create(const VolumeOptions& options) {
  Result<std::unique_ptr<Volume>> volume = Volume::create(options);
  if (!volume) {
    ADD_FAILURE() << volume.error().message();
    return nullptr;
  }
  return std::move(volume).value();
}

inline Completion transfer(Volume& volume, Op op, std::uint64_t offset, std::size_t length, Buffer buffer) {
  return wait_for([&](Callback done) {
    volume.submit({.op = op, .offset = offset, .length = length, .buffer = std::move(buffer)}, std::move(done));
  });
}

// Eight bytes at volume offset p hold a value that depends on p and `seed`.
inline void fill(std::span<std::byte> bytes, std::uint64_t position, std::uint64_t seed) {
  for (std::size_t i = 0; i + 8 <= bytes.size(); i += 8) {
    const std::uint64_t value = (position + i + 1) * 0x9E3779B97F4A7C15U ^ (seed * 0xD1B54A32D192ED03U);
    std::memcpy(bytes.data() + i, &value, sizeof value);
  }
}

inline bool holds(std::span<const std::byte> bytes, std::uint64_t position, std::uint64_t seed) {
  for (std::size_t i = 0; i + 8 <= bytes.size(); i += 8) {
    std::uint64_t value = 0;
    std::memcpy(&value, bytes.data() + i, sizeof value);
    if (value != ((position + i + 1) * 0x9E3779B97F4A7C15U ^ (seed * 0xD1B54A32D192ED03U))) return false;
  }
  return true;
}

inline Error write_pattern(Volume& volume, std::uint64_t offset, std::size_t length, std::uint64_t seed) {
  Buffer buffer = allocate_buffer(length);
  fill(buffer.bytes(), offset, seed);
  return transfer(volume, Op::write, offset, length, std::move(buffer)).error;
}

inline bool read_holds(Volume& volume, std::uint64_t offset, std::size_t length, std::uint64_t seed) {
  Completion completion = transfer(volume, Op::read, offset, length, allocate_buffer(length));
  EXPECT_FALSE(completion.error) << completion.error.message();
  return !completion.error && holds(completion.buffer.bytes(), offset, seed);
}

}  // namespace tierflow::io

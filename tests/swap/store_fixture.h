#pragma once
// A small store, and what its extents hold in each generation.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "io/wait.h"
#include "swap/store.h"
#include "tests/support/forwarding_backend.h"
#include "tests/support/power_cut.h"
#include "tests/support/temp_dir.h"

namespace tierflow::swap {

using testing::read_file;

inline constexpr std::uint64_t kRunId = 0x0123456789abcdefULL;
inline constexpr std::uint64_t kSuperblockA = 0, kSuperblockB = 1 << 20, kManifestA = 2 << 20;

#define ASSERT_OK(expression)                 \
  do {                                        \
    const io::Error error_ = (expression);    \
    ASSERT_FALSE(error_) << error_.message(); \
  } while (false)

inline Layout small_layout() {
  std::vector<UnitShape> units;
  units.push_back(
      {.name = "embedding",
       .groups = {{.elements = 70 * 1024, .state_bytes_element = 4, .state_bytes_block = 8, .precision = "a"},
                  {.elements = 2048, .state_bytes_element = 10, .precision = "b"}}});
  units.push_back({.name = "head",
                   .groups = {{.elements = 2048, .state_bytes_element = 4, .state_bytes_block = 8, .precision = "a"}}});
  return Layout(std::move(units), {{.units = {0}}, {.units = {1}}}, kChunkQuantum);
}
inline const Layout& layout() {
  static const Layout layout = small_layout();
  return layout;
}
inline int chunks() {
  return static_cast<int>(layout().chunks().size());
}

inline StoreOptions options_in(const std::filesystem::path& folder, int generations,
                               std::function<std::unique_ptr<io::Backend>(std::unique_ptr<io::Backend>)> wrap = {}) {
  return {.volume = {.folders = {folder},
                     .engine = io::EngineKind::threads,
                     .allow_buffered = true,
                     .allow_any_filesystem = true,
                     .wrap_backend = std::move(wrap)},
          .generations = generations,
          .identity = R"({"model":"toy"})",
          .run_id = kRunId};
}

// What an extent holds in a generation.
inline std::byte byte_of(ExtentKind kind, int index, int value, std::uint64_t i) {
  return static_cast<std::byte>(value * 37 + index * 11 + static_cast<int>(kind) * 101 + i % 251);
}
inline void fill(std::span<std::byte> bytes, ExtentKind kind, int index, int value) {
  for (std::uint64_t i = 0; i < bytes.size(); ++i) bytes[i] = byte_of(kind, index, value, i);
}

// A drive that cannot read these bytes of the volume, however often it is asked, until it is healed.
class BadSectors final : public testing::ForwardingBackend {
 public:
  using Healed = std::shared_ptr<std::atomic<bool>>;
  BadSectors(std::unique_ptr<io::Backend> inner, std::uint64_t begin, std::uint64_t end, Healed healed = {},
             int error_number = EIO)
      : ForwardingBackend(std::move(inner)),
        begin_(begin + kDataArea),
        end_(end + kDataArea),
        healed_(std::move(healed)),
        error_number_(error_number) {}
  bool push(const io::KernelOp& op) override {
    const bool bad = op.action == io::Action::read && op.offset < end_ && op.offset + op.length > begin_;
    return bad && !(healed_ && *healed_) ? answer(op, -error_number_) : ForwardingBackend::push(op);
  }
  static constexpr std::uint64_t kDataArea = 1 << 20;  // where the volume begins in its file

 private:
  const std::uint64_t begin_, end_;
  const Healed healed_;
  const int error_number_;
};
// As VolumeOptions::wrap_backend.
inline auto with_bad_sectors(std::uint64_t begin, std::uint64_t end, BadSectors::Healed healed = {},
                             int error_number = EIO) {
  return [=](std::unique_ptr<io::Backend> inner) -> std::unique_ptr<io::Backend> {
    return std::make_unique<BadSectors>(std::move(inner), begin, end, healed, error_number);
  };
}

// The error of one request that is waited for.
template <class Submit>
inline io::Error wait_for(Submit submit) {
  return io::wait_for(std::move(submit)).error;
}

inline io::Error write_extent(Store& store, ExtentKind kind, int index, int value) {
  io::Buffer buffer = io::allocate_buffer(store.extent_bytes(kind, index));
  fill(buffer.bytes(), kind, index, value);
  store.stamp(kind, index, buffer.bytes());
  return wait_for([&](io::Callback done) { store.write(kind, index, std::move(buffer), std::move(done)); });
}
inline io::Error write_all(Store& store, int value) {
  for (const ExtentKind kind : {ExtentKind::hi, ExtentKind::state})
    for (int index = 0; index < chunks(); ++index)
      if (io::Error error = write_extent(store, kind, index, value)) return error;
  return {};
}
inline std::string step(int value) {
  return "{\"step\":" + std::to_string(value) + "}";
}
inline io::Error write_and_commit(Store& store, int value) {
  if (io::Error error = write_all(store, value)) return error;
  return store.commit(step(value));
}

inline std::unique_ptr<Store> create(const StoreOptions& options) {
  auto store = Store::create(options, layout());
  EXPECT_TRUE(store.ok()) << store.error().message();
  return std::move(store).value();
}

// Bit for bit the generation in which every extent has this value.
inline void expect_holds(Store& store, int value) {
  EXPECT_EQ(store.progress(), step(value));
  for (const ExtentKind kind : {ExtentKind::hi, ExtentKind::state})
    for (int index = 0; index < chunks(); ++index) {
      auto bytes = store.fetch(kind, index);
      ASSERT_TRUE(bytes.ok()) << bytes.error().message();
      for (std::uint64_t i = 0; i < bytes->size(); ++i)
        ASSERT_EQ(bytes->data()[i], byte_of(kind, index, value, i)) << "generation " << value;
    }
}
inline void expect_opens_at(const StoreOptions& options, int value) {
  auto store = Store::open(options, layout());
  ASSERT_TRUE(store.ok()) << store.error().message();
  EXPECT_EQ((*store)->generation(), static_cast<std::uint64_t>(value));
  EXPECT_EQ((*store)->identity(), options.identity);
  expect_holds(**store, value);
}

// Reads and writes the volume's own bytes.
inline void with_volume(const StoreOptions& options, const std::function<void(io::Volume&)>& use) {
  auto volume = io::Volume::open(options.volume);
  ASSERT_TRUE(volume.ok()) << volume.error().message();
  use(**volume);
}
inline std::vector<std::byte> bytes_at(io::Volume& volume, std::uint64_t offset, std::uint64_t length) {
  std::vector<std::byte> bytes(length);
  io::Buffer buffer = io::allocate_buffer(round_up(length, kSector));
  const std::size_t size = buffer.size();
  const io::Error error = wait_for([&](const io::Callback& done) {
    volume.submit({.op = io::Op::read, .offset = offset, .length = size, .buffer = std::move(buffer)},
                  [&, done](io::Completion&& completion) {
                    if (completion.buffer) std::copy_n(completion.buffer.data(), length, bytes.begin());
                    done(std::move(completion));
                  });
  });
  EXPECT_FALSE(error) << error.message();
  return bytes;
}
inline void put(io::Volume& volume, std::uint64_t offset, std::span<const std::byte> bytes) {
  io::Buffer buffer = io::allocate_buffer(round_up(bytes.size(), kSector));
  std::copy(bytes.begin(), bytes.end(), buffer.data());
  const std::size_t size = buffer.size();
  ASSERT_OK(wait_for([&](io::Callback done) {
    volume.submit({.op = io::Op::write, .offset = offset, .length = size, .buffer = std::move(buffer)},
                  std::move(done));
  }));
}
inline void flip(io::Volume& volume, std::uint64_t offset) {
  std::vector<std::byte> sector = bytes_at(volume, round_up(offset + 1, kSector) - kSector, kSector);
  sector[offset % kSector] ^= std::byte{4};
  put(volume, round_up(offset + 1, kSector) - kSector, sector);
}

}  // namespace tierflow::swap

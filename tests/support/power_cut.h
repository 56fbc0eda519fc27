#pragma once
// Power cuts: a drive whose writes are recorded, and what it may hold when the power goes at any of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/forwarding_backend.h"

namespace tierflow::testing {

// A drive with a cache that forgets: keeps each write until a flush that began after it.
struct DriveCache {
  struct Write {
    std::uint64_t offset;
    std::vector<std::byte> bytes;
    std::size_t durable;  // of the writes before it, when it was issued
  };
  std::mutex mutex;
  std::vector<Write> writes;  // in their order
  std::size_t durable = 0;    // of these, from the first
  bool wrapped = false;       // a drive has this cache

  // What was written so far is on the drive.
  void forget() {
    std::lock_guard lock(mutex);
    writes.clear();
    durable = 0;
  }
};

class CachingBackend final : public ForwardingBackend {
 public:
  CachingBackend(std::unique_ptr<io::Backend> inner, std::shared_ptr<DriveCache> cache)
      : ForwardingBackend(std::move(inner)), cache_(std::move(cache)) {}
  bool push(const io::KernelOp& op) override {
    if (!ForwardingBackend::push(op)) return false;
    std::lock_guard lock(cache_->mutex);
    if (op.action == io::Action::write)
      cache_->writes.push_back({op.offset, {op.data, op.data + op.length}, cache_->durable});
    if (op.action == io::Action::flush) flushes_.emplace_back(op.ticket, cache_->writes.size());
    return true;
  }
  void reap(std::vector<io::KernelResult>& results, std::chrono::nanoseconds timeout) override {
    const std::size_t before = results.size();
    ForwardingBackend::reap(results, timeout);
    std::lock_guard lock(cache_->mutex);
    for (std::size_t i = before; i < results.size(); ++i)
      for (const auto& [ticket, writes] : flushes_)
        if (ticket == results[i].ticket && results[i].value >= 0) cache_->durable = std::max(cache_->durable, writes);
  }

 private:
  std::shared_ptr<DriveCache> cache_;
  std::vector<std::pair<std::uint32_t, std::size_t>> flushes_;  // and the writes pushed before
};

// As VolumeOptions::wrap_backend: of a volume of one drive, the first that is made. What a store has for scratch comes
// after it and counts for nothing.
inline auto caching(std::shared_ptr<DriveCache> cache) {
  return [cache](std::unique_ptr<io::Backend> inner) -> std::unique_ptr<io::Backend> {
    if (std::exchange(cache->wrapped, true)) return inner;
    return std::make_unique<CachingBackend>(std::move(inner), cache);
  };
}

inline std::vector<char> read_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// Cuts the power as soon as the drive was given each of the writes, with six choices of those that survive of its
// cache: all, the last, all but the last, all but one, any half, none. `check` finds the drive as state.tfv in
// `folder`; the first fatal failure ends it. image: the file when the cache was forgotten. stride: every how manieth
// write.
inline void for_each_cut(const DriveCache& cache, const std::vector<char>& image, const std::filesystem::path& folder,
                         const std::function<void(std::size_t cut_at, const std::string& where)>& check,
                         std::size_t stride = 1) {
  std::minstd_rand random(3);
  for (std::size_t cut_at = 1; cut_at <= cache.writes.size(); cut_at += stride) {
    const std::size_t durable = cache.writes[cut_at - 1].durable;
    for (int survivors = 0; survivors < 6; ++survivors) {
      std::vector<char> drive = image;
      const std::size_t spared = durable + random() % std::max<std::size_t>(1, cut_at - durable);
      for (std::size_t i = 0; i < cut_at; ++i) {
        const bool survives = i < durable || survivors == 0 || (survivors == 1 && i + 1 == cut_at) ||
                              (survivors == 2 && i + 1 != cut_at) || (survivors == 3 && i != spared) ||
                              (survivors == 4 && random() % 2 == 0);
        if (survives)
          std::memcpy(drive.data() + cache.writes[i].offset, cache.writes[i].bytes.data(),
                      cache.writes[i].bytes.size());
      }
      std::ofstream(folder / "state.tfv", std::ios::binary | std::ios::trunc)
          .write(drive.data(), static_cast<std::streamsize>(drive.size()));
      std::filesystem::permissions(folder / "state.tfv", std::filesystem::perms(0600));
      check(cut_at, "cut at write " + std::to_string(cut_at) + ", survivors " + std::to_string(survivors));
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
}

}  // namespace tierflow::testing

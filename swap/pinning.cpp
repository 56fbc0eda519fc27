#include "swap/pinning.h"

#include <sys/mman.h>

#include <algorithm>
#include <thread>
#include <utility>
#include <vector>

namespace tierflow::swap {

std::vector<std::size_t> registrations_for(std::span<const std::size_t> buffers) {
  std::vector<std::size_t> sizes;
  std::size_t open = 0;
  for (std::size_t buffer : buffers) {
    if (open != 0 && open + buffer > kRegistration) sizes.push_back(std::exchange(open, 0));
    for (; buffer > kRegistration; buffer -= kRegistration) sizes.push_back(kRegistration);
    open += buffer;
  }
  if (open != 0) sizes.push_back(open);
  return sizes;
}

void populate(std::span<std::byte> piece) {
#ifdef MADV_POPULATE_WRITE
  constexpr std::size_t kPart = std::size_t{16} << 20, kMostThreads = 8;
  const std::size_t count =
      std::min({kMostThreads, std::size_t{std::thread::hardware_concurrency()}, piece.size() / kPart});
  std::vector<std::jthread> threads;
  for (std::size_t i = 0; i < count; ++i)
    threads.emplace_back([=] {
      for (std::size_t at = i * kPart; at < piece.size(); at += count * kPart)
        madvise(piece.data() + at, std::min(kPart, piece.size() - at), MADV_POPULATE_WRITE);
    });
#endif
}

std::string PinnedPieces::pin(std::span<const std::span<std::byte>> pieces, const Register& register_piece) {
  std::string reason;
  std::size_t done = 0, total = 0;
  for (const auto piece : pieces) total += piece.size();
  for (const auto piece : pieces) {
    if (!reason.empty()) break;
    for (std::size_t size = piece.size();; size = size / 2 / kLeastRegistration * kLeastRegistration) {
      const std::string refused = register_piece(piece.first(size));
      if (refused.empty()) {
        pieces_.push_back(piece.first(size));
        done += size;
        break;
      }
      if (reason.empty()) reason = refused;
      if (size / 2 < kLeastRegistration) break;
    }
  }
  if (done == total) return {};
  const auto mib = [](std::size_t bytes) { return std::to_string(bytes >> 20) + " MiB"; };
  return "of " + mib(total) + " of host memory " + (done == 0 ? "none" : mib(done)) + " could be pinned (" + reason +
         "): copies of the rest are slower; a higher limit on locked memory or a smaller --host-memory helps";
}

void PinnedPieces::unpin(const std::function<void(std::span<std::byte>)>& unregister_piece) {
  for (const auto piece : pieces_) unregister_piece(piece);
  pieces_.clear();
}

void PinnedPieces::split(const std::byte* at, std::size_t bytes,
                         const std::function<void(std::size_t, std::size_t)>& copy) const {
  std::size_t done = 0;
  const auto until = [&](const std::byte* border) {
    if (border <= at + done || done == bytes) return;
    const std::size_t part = std::min(bytes - done, static_cast<std::size_t>(border - (at + done)));
    copy(done, part);
    done += part;
  };
  for (const auto piece : pieces_) {
    until(piece.data());
    until(piece.data() + piece.size());
  }
  until(at + bytes);
}

bool PinnedPieces::covers(const std::byte* at, std::size_t bytes) const {
  return std::any_of(pieces_.begin(), pieces_.end(),
                     [&](const auto piece) { return at >= piece.data() && at + bytes <= piece.data() + piece.size(); });
}

}  // namespace tierflow::swap

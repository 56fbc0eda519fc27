#pragma once
// Which bytes of the host slab are pinned for fast copies. Systems limit pinning (under WSL2 to a share of memory, in
// containers by RLIMIT_MEMLOCK), so a part of a slab may be pinned: from its beginning, where the streaming buffers
// are.
#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace tierflow::swap {

inline constexpr std::size_t kRegistration = std::size_t{1} << 30;        // bytes registered in one go, at most
inline constexpr std::size_t kLeastRegistration = std::size_t{64} << 20;  // smaller pieces are not tried

// Bytes of device memory that a CUDA device takes for itself: gradients go through them to host memory that is not
// pinned.
inline constexpr std::size_t kBounceBytes = std::size_t{8} << 20;

// How consecutive buffers of these sizes are registered: the size of each registration, kRegistration at most. No
// buffer crosses the border of two registrations unless it is larger than one. A larger buffer begins a registration of
// its own.
std::vector<std::size_t> registrations_for(std::span<const std::size_t> buffers);

// Has the system give memory to these pages now, by several threads: registering them would do it by one. Where the
// system cannot (before Linux 5.14), nothing happens.
void populate(std::span<std::byte> piece);

// Registered pieces, one after the other from the beginning of the slab.
class PinnedPieces {
 public:
  // Registers the piece; returns why it could not, or an empty text.
  using Register = std::function<std::string(std::span<std::byte> piece)>;

  // Registers `pieces`, each of kRegistration at most, until the first refusal. Then tries half of the refused piece, a
  // quarter of it and so on. Returns what to tell the user; empty if all of them are pinned.
  std::string pin(std::span<const std::span<std::byte>> pieces, const Register& register_piece);
  // Unregisters all pieces, in the order of their registration.
  void unpin(const std::function<void(std::span<std::byte> piece)>& unregister_piece);

  // Calls copy(offset, bytes) for consecutive parts of [at, at + bytes), none of which crosses the border of a
  // registration: a copy must not.
  void split(const std::byte* at, std::size_t bytes, const std::function<void(std::size_t, std::size_t)>& copy) const;
  // Whether all of the range lies in one registration.
  bool covers(const std::byte* at, std::size_t bytes) const;
  const std::byte* begin() const { return pieces_.empty() ? nullptr : pieces_.front().data(); }

 private:
  std::vector<std::span<std::byte>> pieces_;
};

}  // namespace tierflow::swap

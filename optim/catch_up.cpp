// Updates whose gradients are all zero, replayed while the state lies in the processor's cache.
#include <algorithm>
#include <array>
#include <cstring>

#include "optim/adamw.h"

namespace tierflow::optim {
namespace {

constexpr std::size_t kWindow = 16 * kBlock;  // of elements that are replayed together: their state fits the cache

// Of one block, after an update.
bool is_zero(const Moment& moment, std::size_t count) {
  if (moment.format == MomentFormat::block8) return *moment.absmax == 0;
  const auto* bytes = static_cast<const unsigned char*>(moment.values);
  const std::size_t size = count * (moment.format == MomentFormat::bf16 ? 2 : 4);
  return bytes[0] == 0 && std::memcmp(bytes, bytes + 1, size - 1) == 0;
}

}  // namespace

// Where both moments are zero and nothing decays, an update adds 0 * lr to each weight: it leaves all bits as they are,
// but for those of a NaN, which the first update has made quiet. So from then on the block rests.
void adamw_catch_up(std::span<const AdamWParams> updates, const State& state, std::size_t n) {
  alignas(64) static constexpr std::array<std::uint16_t, kWindow> kZeros{};
  if (updates.empty()) return;
  const bool may_rest = std::ranges::all_of(
      updates, [](const AdamWParams& update) { return update.rule == Rule::adamw && update.weight_decay == 0.0F; });
  const auto replay = [&](std::span<const AdamWParams> some, std::size_t first, std::size_t count) {
    for (AdamWParams update : some) {
      update.first_element += first;
      adamw_update(update, kZeros.data(), state_from(state, first), count);
    }
  };
  for (std::size_t window = 0; window < n; window += kWindow) {
    const std::size_t end = std::min(window + kWindow, n);
    replay(updates.first(1), window, end - window);
    const auto rests = [&](std::size_t first) {
      const State block = state_from(state, first);
      const std::size_t count = std::min(kBlock, end - first);
      return may_rest && is_zero(block.m, count) && is_zero(block.v, count);
    };
    for (std::size_t first = window; first < end;) {
      std::size_t until = first;
      while (until < end && !rests(until)) until = std::min(until + kBlock, end);
      if (until > first) replay(updates.subspan(1), first, until - first);
      first = until + kBlock;  // the block there rests
    }
  }
}

}  // namespace tierflow::optim

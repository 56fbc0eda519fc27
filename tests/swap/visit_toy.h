#pragma once
// A toy of integers that clients of single visits train: each visit's gradient and each update can be worked out beside
// the run, bit for bit.
#include <bit>
#include <cstdint>
#include <span>

#include "swap/executor.h"

namespace tierflow::swap {

inline std::uint16_t word_at(int unit, std::uint64_t i) {
  return static_cast<std::uint16_t>((unit * 7919 + i * 31) & 0x7fff);
}
// What a visit adds; every few elements hold a value whose sum needs more than bf16's eight bits.
inline float gradient_at(std::uint16_t word, int visit, std::uint64_t i) {
  return static_cast<float>((word & 0x3fU) + visit) * (i % 3 == 0 ? 65536.0F : 1.0F);
}
inline float value_of(std::uint16_t high, std::uint16_t low) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(high) << 16 | low);
}
inline std::uint16_t rounded(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}
inline void apply(std::uint16_t& word, std::uint16_t gradient, std::byte& state) {
  state = static_cast<std::byte>(static_cast<unsigned>(state) * 5 + (gradient & 0xffU));
  word = static_cast<std::uint16_t>((word * 3 + gradient + static_cast<unsigned>(state)) & 0x7fff);
}

class Work final : public UpdateWork {
 public:
  io::Error measure(const Chunk&, std::span<const std::byte>) override { return {}; }
  io::Error accumulate(const Chunk& chunk, std::span<const std::byte> incoming, std::span<std::byte> high,
                       std::span<std::byte> low, bool first) override {
    auto* upper = reinterpret_cast<std::uint16_t*>(high.data());
    auto* lower = reinterpret_cast<std::uint16_t*>(low.data());
    const auto* added = reinterpret_cast<const std::uint16_t*>(incoming.data());
    for (std::uint64_t i = 0; i < chunk.elements; ++i) {
      const auto bits =
          std::bit_cast<std::uint32_t>(value_of(upper[i], first ? std::uint16_t{0} : lower[i]) + value_of(added[i], 0));
      upper[i] = static_cast<std::uint16_t>(bits >> 16);
      lower[i] = static_cast<std::uint16_t>(bits);
    }
    return {};
  }
  io::Error round_sum(const Chunk& chunk, std::span<std::byte> high, std::span<const std::byte> low) override {
    auto* upper = reinterpret_cast<std::uint16_t*>(high.data());
    const auto* lower = reinterpret_cast<const std::uint16_t*>(low.data());
    for (std::uint64_t i = 0; i < chunk.elements; ++i) upper[i] = rounded(value_of(upper[i], lower[i]));
    return {};
  }
  io::Error update(const Chunk& chunk, std::span<const std::byte> gradient, std::span<std::byte> words,
                   std::span<std::byte> state) override {
    auto* word = reinterpret_cast<std::uint16_t*>(words.data());
    const auto* grad = reinterpret_cast<const std::uint16_t*>(gradient.data());
    for (std::uint64_t i = 0; i < chunk.elements; ++i) apply(word[i], grad[i], state[i]);
    return {};
  }
};

}  // namespace tierflow::swap

#pragma once
// A toy model without torch: integers stand for weights and activations, so that a sequential loop gives the expected
// bits.
#include <bit>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "swap/executor.h"
#include "tests/swap/devices_under_test.h"

namespace tierflow::swap::toy {

inline constexpr std::uint64_t kCarryBytes = 4096;

inline float toy_gradient(std::uint16_t word, int stage, int micro_batch) {
  return static_cast<float>((word & 0x3fU) + 2 * stage + micro_batch);
}
inline std::uint16_t to_bf16(float value) {
  return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
}  // small integers: exact
inline std::uint16_t initial_word(int unit, std::uint64_t i) {
  return static_cast<std::uint16_t>((unit * 7919 + i * 31) & 0x7fff);
}
inline std::byte initial_state(int unit, std::uint64_t i) {
  return static_cast<std::byte>((unit * 13 + i * 7) & 0xff);
}
inline void toy_update(std::uint16_t& word, std::uint16_t gradient, std::byte& state) {
  state = static_cast<std::byte>(static_cast<unsigned>(state) * 5 + (gradient & 0xffU));
  word = static_cast<std::uint16_t>((word * 3 + gradient + static_cast<unsigned>(state)) & 0x7fff);
}

inline std::uint64_t toy_sum(std::span<const std::uint16_t> gradient) {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < gradient.size(); ++i) sum = sum * 31 + gradient[i];
  return sum;
}

struct Toy {
  std::vector<UnitShape> units;
  std::vector<StageShape> stages;
  std::uint64_t chunk_elements = kChunkQuantum;
};

inline Toy make_toy(bool tied, int blocks) {
  Toy toy;
  const auto unit = [&](const char* name, std::uint64_t matrix, std::uint64_t norms) {
    toy.units.push_back(
        {.name = name,
         .groups = {{.elements = matrix, .state_bytes_element = 4, .state_bytes_block = 8, .precision = "a"},
                    {.elements = norms, .state_bytes_element = 10, .state_bytes_block = 0, .precision = "b"}}});
  };
  unit("embedding", 150 * 1024, 2048);
  toy.stages.push_back({.units = {0}, .backward_needs_weights = false});
  for (int block = 0; block < blocks; ++block) {
    unit("block", 180 * 1024 + 2048 * block, 4096);
    toy.stages.push_back({.units = {1 + block}, .carry_bytes = kCarryBytes});
  }
  unit("head", tied ? 2048 : 140 * 1024, 2048);
  toy.stages.push_back({.units = {1 + blocks}, .carry_bytes = kCarryBytes});
  if (tied) toy.stages.back().units.push_back(0);
  return toy;
}

// The expected result, by the plain loop: one unit's state byte an element stands for all of its state.
struct Reference {
  std::vector<std::vector<std::uint16_t>> words;
  std::vector<std::vector<std::byte>> state;
  std::vector<std::uint64_t> results;  // of each step and micro-batch
};

inline std::uint64_t mix(std::uint64_t value, std::uint64_t more) {
  return (value ^ more) * 0x9E3779B97F4A7C15ULL + (value >> 29);
}

inline std::uint64_t toy_forward(std::uint64_t carry, std::span<const std::uint16_t> words) {
  for (std::size_t i = 0; i < words.size(); i += 97) carry = mix(carry, words[i]);
  return mix(carry, words.back());
}

// Where a client that knows of zeros has some: in all of a block, in half of another one.
inline bool is_zero(int unit, std::uint64_t element) {
  return unit == 1 || (unit == 2 && element / 10000 % 2 == 0);
}

inline Reference run_reference(const Toy& toy, const Layout& layout, int steps, int micro_batches, bool zeros = false) {
  Reference reference;
  for (int unit = 0; unit < static_cast<int>(toy.units.size()); ++unit) {
    reference.words.emplace_back(layout.unit_elements(unit));
    reference.state.emplace_back(layout.unit_elements(unit));
    for (std::uint64_t i = 0; i < layout.unit_elements(unit); ++i) {
      reference.words[unit][i] = initial_word(unit, i);
      reference.state[unit][i] = initial_state(unit, i);
    }
  }
  for (int step = 0; step < steps; ++step) {
    std::vector<std::vector<float>> gradients;
    for (const auto& words : reference.words) gradients.emplace_back(words.size(), 0.0F);
    for (int micro_batch = 0; micro_batch < micro_batches; ++micro_batch) {
      std::uint64_t carry = step * 100 + micro_batch;
      for (int stage = 0; stage < static_cast<int>(toy.stages.size()); ++stage)
        for (int unit : toy.stages[stage].units) {
          carry = toy_forward(carry, reference.words[unit]);
          for (std::size_t i = 0; i < gradients[unit].size(); ++i) {
            const bool embedding_backward = stage == 0;  // has no weights at hand
            gradients[unit][i] += toy_gradient(embedding_backward ? 1 : reference.words[unit][i], stage, micro_batch);
          }
        }
      reference.results.push_back(carry);
    }
    for (std::size_t unit = 0; unit < gradients.size(); ++unit)
      for (std::size_t i = 0; i < gradients[unit].size(); ++i)
        toy_update(reference.words[unit][i],
                   zeros && is_zero(static_cast<int>(unit), i) ? std::uint16_t{0} : to_bf16(gradients[unit][i]),
                   reference.state[unit][i]);
  }
  return reference;
}

class ToyWork final : public UpdateWork {
 public:
  io::Error measure(const Chunk& chunk, std::span<const std::byte> gradient) override {
    ++measured;
    compare_found(chunk, gradient);
    return {};
  }
  io::Error keep_gradient(const Chunk& chunk, Device& device, const DeviceUpdate& at) override {
    ++measured;
    device.round_gradient(StreamId::update, at.gradient, at.sum, chunk.elements);
    return device.synchronize(device.record(StreamId::update));
  }
  void enqueue_measuring(const Chunk& chunk, Device& device, StreamId stream, const std::uint16_t* gradient,
                         std::byte* found) override {
    compute_on(device, stream, [n = chunk.elements, gradient, found] {
      const std::uint64_t sum = toy_sum({gradient, n});
      std::memcpy(found, &sum, sizeof(sum));
    });
  }
  io::Error take_measured(const Chunk& chunk, std::span<const std::byte> bytes) override {
    std::lock_guard lock(mutex_);
    std::memcpy(&found_[chunk.id], bytes.data(), sizeof(std::uint64_t));
    return {};
  }
  io::Error update(const Chunk& chunk, std::span<const std::byte> gradient, std::span<std::byte> words,
                   std::span<std::byte> state) override {
    auto* word = reinterpret_cast<std::uint16_t*>(words.data());
    const auto* grad = reinterpret_cast<const std::uint16_t*>(gradient.data());
    for (std::uint64_t i = 0; i < chunk.elements; ++i) toy_update(word[i], grad[i], state[i]);
    ++updated;
    compare_found(chunk, gradient);
    return {};
  }
  io::Error update_on_device(const Chunk& chunk, Device& device, const DeviceUpdate& at) override {
    if (at.sum != nullptr) device.round_gradient(StreamId::update, at.gradient, at.sum, chunk.elements);
    compute_on(device, StreamId::update, [n = chunk.elements, at] {
      for (std::uint64_t i = 0; i < n; ++i) toy_update(at.words[i], at.gradient[i], at.state[i]);
    });
    ++updated;
    ++on_device;
    return device.synchronize(device.record(StreamId::update));
  }
  std::vector<ElementRange> zero_gradient(const Chunk& chunk) const override {
    std::vector<ElementRange> ranges;
    for (std::uint64_t i = 0; zeros && i < chunk.elements; ++i) {
      if (!is_zero(chunk.unit, chunk.first + i)) continue;
      if (ranges.empty() || ranges.back().end != i) ranges.push_back({i, i});
      ++ranges.back().end;
    }
    return ranges;
  }
  std::string progress() const override {
    if (before_commit) before_commit();
    return std::to_string(after_steps >= 0 ? after_steps : ++commits);
  }
  int after_steps = -1;  // that what is committed is the state of; -1: of one more each time
  int measured = 0, updated = 0, on_device = 0;
  int found = 0, found_otherwise = 0;  // gradients that were measured on their way; and not as they are
  bool zeros = false;                  // what is_zero() is
  mutable int commits = 0;             // each step's, as a task of the next one
  std::function<void()> before_commit;

 private:
  void compare_found(const Chunk& chunk, std::span<const std::byte> gradient) {
    std::lock_guard lock(mutex_);
    const auto sum = found_.find(chunk.id);
    if (sum == found_.end()) return;
    ++found;
    const auto* words = reinterpret_cast<const std::uint16_t*>(gradient.data());
    if (sum->second != toy_sum({words, chunk.elements})) ++found_otherwise;
    found_.erase(sum);
  }

  std::mutex mutex_;
  std::map<int, std::uint64_t> found_;  // by chunk
};

}  // namespace tierflow::swap::toy

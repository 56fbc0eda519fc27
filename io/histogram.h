#pragma once
// Durations in buckets of one eighth of an octave: percentiles to within 9% in constant memory.
#include <array>
#include <bit>
#include <chrono>
#include <cstdint>

namespace tierflow::io {

class Histogram {
 public:
  void add(std::chrono::nanoseconds duration) {
    const auto value = static_cast<std::uint64_t>(duration.count() < 0 ? 0 : duration.count());
    ++buckets_[bucket(value)];
    ++count_;
    if (duration > longest_) longest_ = duration;
  }

  std::uint64_t count() const { return count_; }
  std::chrono::nanoseconds longest() const { return longest_; }

  // The duration that `share` (0..1) of all stay within.
  std::chrono::nanoseconds percentile(double share) const {
    const auto wanted = static_cast<std::uint64_t>(share * static_cast<double>(count_));
    std::uint64_t seen = 0;
    for (std::size_t i = 0; i < buckets_.size(); ++i) {
      seen += buckets_[i];
      if (seen > wanted || (seen == count_ && seen != 0)) {
        const std::chrono::nanoseconds upper{static_cast<std::int64_t>(upper_bound(i))};
        return upper < longest_ ? upper : longest_;
      }
    }
    return {};
  }

 private:
  static std::size_t bucket(std::uint64_t value) {
    if (value < 8) return value;
    const int octave = std::bit_width(value) - 4;
    return static_cast<std::size_t>(8 * octave) + (value >> octave);
  }
  static std::uint64_t upper_bound(std::size_t index) {
    if (index < 16) return index;
    const std::size_t octave = index / 8 - 1;
    return ((index % 8 + 8 + 1) << octave) - 1;
  }

  std::array<std::uint64_t, 8 * 62> buckets_{};
  std::uint64_t count_ = 0;
  std::chrono::nanoseconds longest_{0};
};

}  // namespace tierflow::io

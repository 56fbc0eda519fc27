#include "io/layout.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace tierflow::io {

Layout::Layout(std::uint64_t bytes, std::uint64_t unit, std::vector<std::uint32_t> weights)
    : bytes_(bytes), unit_(unit), weights_(std::move(weights)) {
  // Deal the places so that each member's are spread evenly over the row: always to the one that is furthest behind its
  // share.
  const std::uint64_t total = std::accumulate(weights_.begin(), weights_.end(), std::uint64_t{0});
  std::vector<std::uint32_t> dealt(weights_.size(), 0);
  for (std::uint64_t place = 0; place < total; ++place) {
    std::uint32_t next = 0;
    std::int64_t worst = INT64_MIN;
    for (std::uint32_t member = 0; member < weights_.size(); ++member) {
      if (dealt[member] == weights_[member]) continue;
      const std::int64_t behind =
          static_cast<std::int64_t>(weights_[member] * (place + 1)) - static_cast<std::int64_t>(dealt[member] * total);
      if (behind > worst) {
        worst = behind;
        next = member;
      }
    }
    pattern_.push_back({next, dealt[next]++});
  }
}

std::uint64_t Layout::member_bytes(std::uint32_t member) const {
  if (weights_.size() == 1) return bytes_;
  const std::uint64_t row = unit_ * pattern_.size();
  return (bytes_ + row - 1) / row * weights_[member] * unit_;
}

Piece Layout::locate(std::uint64_t offset) const {
  if (weights_.size() == 1) return {0, offset, offset, bytes_ - offset};
  const std::uint64_t number = offset / unit_;
  const std::uint64_t inside = offset % unit_;
  const Place place = pattern_[number % pattern_.size()];
  const std::uint64_t member_unit = number / pattern_.size() * weights_[place.member] + place.nth;
  return {place.member, member_unit * unit_ + inside, offset, unit_ - inside};
}

std::vector<std::uint32_t> weights_for(std::span<const double> speeds) {
  constexpr std::uint32_t kMost = 16;
  std::vector<std::uint32_t> best(speeds.size(), 1);
  if (speeds.empty()) return best;
  const double fastest = *std::max_element(speeds.begin(), speeds.end());
  const double sum = std::accumulate(speeds.begin(), speeds.end(), 0.0);
  if (!(fastest > 0) || !std::isfinite(sum)) return best;
  double best_share = 0;
  for (std::uint32_t top = 1; top <= kMost; ++top) {
    std::vector<std::uint32_t> weights;
    std::uint32_t total = 0;
    double slowest = 0;  // time until the last member has done its part of one row
    for (double speed : speeds) {
      const auto weight = static_cast<std::uint32_t>(std::max(1.0, std::round(speed / fastest * top)));
      weights.push_back(weight);
      total += weight;
      slowest = std::max(slowest, weight / std::max(speed, fastest * 1e-6));
    }
    const double share = total / slowest / sum;
    if (share > best_share + 1e-9) {
      best_share = share;
      best = weights;
    }
    if (best_share >= 0.97) break;
  }
  return best;
}

}  // namespace tierflow::io

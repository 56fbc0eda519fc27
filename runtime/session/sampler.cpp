#include "runtime/session/sampler.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "runtime/base/exception.h"
#include "runtime/base/mix_bits.h"

namespace tierflow {
namespace {

struct Candidate {
  double logit;
  std::int64_t token;
};

bool more_likely(const Candidate& a, const Candidate& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
}

// In [0, 1).
double uniform(std::uint64_t seed, std::uint64_t sequence, std::uint64_t position) {
  return static_cast<double>(mix_bits(mix_bits(mix_bits(seed) ^ sequence) ^ position) >> 11) * 0x1p-53;
}

void penalise(std::vector<Candidate>& candidates, std::span<const std::int64_t> before, double penalty) {
  if (penalty == 1) return;
  std::vector<bool> seen(candidates.size());
  for (const std::int64_t token : before) seen[static_cast<std::size_t>(token)] = true;
  for (Candidate& each : candidates)
    if (seen[static_cast<std::size_t>(each.token)]) each.logit *= each.logit < 0 ? penalty : 1 / penalty;
}

// Leaves the k most likely ones and those as likely as the last of these; all for k 0.
void keep_most_likely(std::vector<Candidate>& candidates, std::int64_t k) {
  if (k == 0 || k >= static_cast<std::int64_t>(candidates.size())) return;
  std::nth_element(candidates.begin(), candidates.begin() + (k - 1), candidates.end(), more_likely);
  const double least = candidates[static_cast<std::size_t>(k - 1)].logit;
  std::erase_if(candidates, [&](const Candidate& each) { return each.logit < least; });
}

double sum_of(const std::vector<Candidate>& candidates) {
  double sum = 0;
  for (const Candidate& each : candidates) sum += std::exp(each.logit);
  return sum;
}

// Candidates from the most likely one on, sorted as far as they are looked at.
class Descending {
 public:
  explicit Descending(std::vector<Candidate>& candidates) : candidates_(candidates) {}
  const Candidate& at(std::size_t i) {
    if (i >= sorted_) {
      const std::size_t end = std::min(candidates_.size(), std::max<std::size_t>(64, 8 * i));
      const auto first = candidates_.begin();
      const auto from = first + static_cast<std::ptrdiff_t>(sorted_), to = first + static_cast<std::ptrdiff_t>(end);
      std::partial_sort(from, to, candidates_.end(), more_likely);
      sorted_ = end;
    }
    return candidates_[i];
  }

 private:
  std::vector<Candidate>& candidates_;
  std::size_t sorted_ = 0;
};

// How many of the most likely ones together reach top_p, at least one. The highest logit is 0.
std::size_t nucleus(Descending& ordered, std::size_t count, double top_p, double total) {
  double sum = 0;
  std::size_t kept = 0;
  while (kept < count && (kept == 0 || sum < top_p * total)) sum += std::exp(ordered.at(kept++).logit);
  return kept;
}

// Tokens that would end a sequence of n tokens which is there already.
void add_repeating(std::span<const std::int64_t> before, std::int64_t n, std::vector<std::int64_t>& forbidden) {
  const auto length = std::ssize(before);
  if (n <= 0 || length + 1 < n) return;
  const auto last = before.last(static_cast<std::size_t>(n - 1));
  for (std::int64_t end = n - 1; end < length; ++end)
    if (std::ranges::equal(before.subspan(static_cast<std::size_t>(end - (n - 1)), last.size()), last))
      forbidden.push_back(before[static_cast<std::size_t>(end)]);
}

}  // namespace

std::int64_t next_token(std::span<const float> logits, std::span<const std::int64_t> before, const Sampling& sampling,
                        std::uint64_t seed, std::uint64_t sequence, std::span<const std::int64_t> held_back) {
  float most = -INFINITY;
  bool finite = true;
  std::size_t best = 0;
  for (std::size_t token = 0; token < logits.size(); ++token) {
    finite = finite && !std::isnan(logits[token]) && logits[token] != INFINITY;
    if (logits[token] > most) {
      most = logits[token];
      best = token;
    }
  }
  if (!finite)
    throw Exception(io::ErrorKind::numeric, "the logits of the next token are not finite: look at the weights");
  std::vector<std::int64_t> forbidden(held_back.begin(), held_back.end());
  forbidden.insert(forbidden.end(), sampling.suppress_tokens.begin(), sampling.suppress_tokens.end());
  add_repeating(before, sampling.no_repeat_ngram_size, forbidden);
  if (!sampling.sample && sampling.repetition_penalty == 1 && forbidden.empty()) return static_cast<std::int64_t>(best);
  std::vector<Candidate> candidates(logits.size());
  for (std::size_t token = 0; token < logits.size(); ++token)
    candidates[token] = {logits[token], static_cast<std::int64_t>(token)};
  penalise(candidates, before, sampling.repetition_penalty);
  std::ranges::sort(forbidden);
  if (!forbidden.empty())
    std::erase_if(candidates, [&](const Candidate& each) { return std::ranges::binary_search(forbidden, each.token); });
  if (candidates.empty()) fail_usage("no token may come next: generation_config.json forbids all of them");
  const Candidate first = *std::min_element(candidates.begin(), candidates.end(), more_likely);
  if (!sampling.sample) return first.token;
  for (Candidate& each : candidates) each.logit = (each.logit - first.logit) / sampling.temperature;
  keep_most_likely(candidates, sampling.top_k);
  Descending ordered(candidates);
  std::size_t count = candidates.size();
  double total = sum_of(candidates);
  if (sampling.top_p < 1) count = nucleus(ordered, count, sampling.top_p, total);
  if (sampling.top_p < 1 || sampling.min_p > 0) {
    std::size_t kept = 0;
    total = 0;
    while (kept < count && (kept == 0 || std::exp(ordered.at(kept).logit) >= sampling.min_p))
      total += std::exp(ordered.at(kept++).logit);
    count = kept;
  }
  double left = uniform(seed, sequence, before.size()) * total;
  for (std::size_t i = 0; i < count; ++i) {
    left -= std::exp(ordered.at(i).logit);
    if (left < 0) return ordered.at(i).token;
  }
  return ordered.at(count - 1).token;
}

}  // namespace tierflow

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

// Leaves the most likely ones that together reach top_p, at least one. Sorted already.
void keep_nucleus(std::vector<Candidate>& candidates, double top_p) {
  double total = 0, sum = 0;
  for (const Candidate& each : candidates) total += std::exp(each.logit - candidates.front().logit);
  std::size_t kept = 0;
  while (kept < candidates.size() && (kept == 0 || sum < top_p * total))
    sum += std::exp(candidates[kept++].logit - candidates.front().logit);
  candidates.resize(kept);
}

}  // namespace

std::int64_t next_token(std::span<const float> logits, std::span<const std::int64_t> before, const Sampling& sampling,
                        std::uint64_t seed, std::uint64_t sequence) {
  std::vector<Candidate> candidates;
  candidates.reserve(logits.size());
  for (std::size_t token = 0; token < logits.size(); ++token) {
    if (std::isnan(logits[token]) || logits[token] == INFINITY)
      throw Exception(io::ErrorKind::numeric, "the logits of the next token are not finite: look at the weights");
    candidates.push_back({logits[token], static_cast<std::int64_t>(token)});
  }
  penalise(candidates, before, sampling.repetition_penalty);
  if (!sampling.sample) return std::min_element(candidates.begin(), candidates.end(), more_likely)->token;
  for (Candidate& each : candidates) each.logit /= sampling.temperature;
  const auto count = static_cast<std::int64_t>(candidates.size());
  const std::int64_t kept = sampling.top_k == 0 ? count : std::min(count, sampling.top_k);
  std::partial_sort(candidates.begin(), candidates.begin() + kept, candidates.end(), more_likely);
  candidates.resize(static_cast<std::size_t>(kept));
  if (sampling.top_p < 1) keep_nucleus(candidates, sampling.top_p);
  const double most = candidates.front().logit;
  std::erase_if(candidates, [&](const Candidate& each) { return std::exp(each.logit - most) < sampling.min_p; });
  double total = 0;
  for (const Candidate& each : candidates) total += std::exp(each.logit - most);
  double left = uniform(seed, sequence, before.size()) * total;
  for (const Candidate& each : candidates) {
    left -= std::exp(each.logit - most);
    if (left < 0) return each.token;
  }
  return candidates.back().token;
}

}  // namespace tierflow

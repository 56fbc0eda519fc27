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

// Leaves the most likely ones that together reach top_p, at least one. Sorted already, the highest logit 0.
void keep_nucleus(std::vector<Candidate>& candidates, double top_p) {
  double total = 0, sum = 0;
  for (const Candidate& each : candidates) total += std::exp(each.logit);
  std::size_t kept = 0;
  while (kept < candidates.size() && (kept == 0 || sum < top_p * total)) sum += std::exp(candidates[kept++].logit);
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
  const double highest = std::min_element(candidates.begin(), candidates.end(), more_likely)->logit;
  for (Candidate& each : candidates) each.logit = (each.logit - highest) / sampling.temperature;
  keep_most_likely(candidates, sampling.top_k);
  std::sort(candidates.begin(), candidates.end(), more_likely);
  if (sampling.top_p < 1) keep_nucleus(candidates, sampling.top_p);
  std::erase_if(candidates, [&](const Candidate& each) { return std::exp(each.logit) < sampling.min_p; });
  double total = 0;
  for (const Candidate& each : candidates) total += std::exp(each.logit);
  double left = uniform(seed, sequence, before.size()) * total;
  for (const Candidate& each : candidates) {
    left -= std::exp(each.logit);
    if (left < 0) return each.token;
  }
  return candidates.back().token;
}

}  // namespace tierflow

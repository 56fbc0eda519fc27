#include "runtime/models/router_balance.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "runtime/models/router.h"
#include "runtime/models/upload.h"

namespace tierflow::models {

void RouterLoads::add(const RouterLoads& layer) {
  tokens += layer.tokens;
  chosen.resize(layer.chosen.size());
  scores.resize(layer.scores.size());
  for (std::size_t expert = 0; expert < chosen.size(); ++expert) {
    chosen[expert] += layer.chosen[expert];
    scores[expert] += layer.scores[expert];
  }
}

double RouterLoads::loss() const {
  if (tokens == 0) return 0;
  double sum = 0;
  for (std::size_t expert = 0; expert < chosen.size(); ++expert) sum += chosen[expert] * scores[expert];
  return static_cast<double>(chosen.size()) * sum / static_cast<double>(tokens) / static_cast<double>(tokens);
}

std::vector<double> RouterLoads::gradient(double factor) const {
  std::vector<double> gradient(chosen.size());
  if (tokens == 0) return gradient;
  const double each = factor * static_cast<double>(chosen.size()) / static_cast<double>(tokens);
  for (std::size_t expert = 0; expert < chosen.size(); ++expert)
    gradient[expert] = each * chosen[expert] / static_cast<double>(tokens);
  return gradient;
}

namespace {

void tell(const Routing& routing, RouterBalance* balance) {
  const auto experts = static_cast<std::size_t>(routing.scores.size(1));
  std::vector<at::Tensor> sums;
  for (const CountedTokens& part : balance->parts)
    sums.push_back(routing.scores.narrow(0, part.begin, part.length).sum(0));
  for (RouterLoads& loads : balance->found)
    loads = {.chosen = std::vector<double>(experts), .scores = std::vector<double>(experts)};
  if (sums.empty()) return;
  const at::Tensor chosen = download(routing.chosen), scores = download(at::stack(sums).to(at::kDouble));
  const auto* expert_of = chosen.const_data_ptr<std::int64_t>();
  const auto* score_of = scores.const_data_ptr<double>();
  for (const CountedTokens& part : balance->parts) {
    RouterLoads& loads = balance->found[part.micro_batch];
    loads.tokens += part.length;
    for (std::int64_t pair = part.begin * chosen.size(1); pair < (part.begin + part.length) * chosen.size(1); ++pair)
      loads.chosen[static_cast<std::size_t>(expert_of[pair])] += 1;
    for (double& sum : loads.scores) sum += *score_of++;
  }
}

}  // namespace

void add_gradient(const RouterBalance* balance, const at::Tensor& d_scores) {
  if (balance == nullptr) return;
  const auto experts = d_scores.size(1);
  at::Tensor rows = at::empty({static_cast<std::int64_t>(balance->gradients.size()), experts}, at::kDouble);
  auto* value = rows.mutable_data_ptr<double>();
  for (const std::vector<double>& gradient : balance->gradients) value = std::ranges::copy(gradient, value).out;
  rows = upload({rows.to(d_scores.scalar_type())}, d_scores.device()).front();
  for (const CountedTokens& part : balance->parts)
    d_scores.narrow(0, part.begin, part.length).add_(rows[static_cast<std::int64_t>(part.micro_batch)]);
}

void balance_routing(const Routing& routing, RouterBalance* balance) {
  if (balance == nullptr) return;
  if (!at::GradMode::is_enabled()) return tell(routing, balance);
  if (!routing.scores.requires_grad()) return;
  routing.scores.register_hook([balance](const at::Tensor& gradient) {
    at::Tensor both = gradient.clone();
    add_gradient(balance, both);
    return both;
  });
}

}  // namespace tierflow::models

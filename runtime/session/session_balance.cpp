// A step with the load-balancing loss of a mixture's routers (models/router_balance.h).
#include "runtime/session/session_impl.h"

namespace tierflow {
namespace {

// Of a micro-batch: its tokens that are no padding.
std::vector<models::CountedTokens> counted_tokens(const MicroBatch& batch) {
  if (batch.lengths.empty()) return {{.begin = 0, .length = batch.ids.numel()}};
  std::vector<models::CountedTokens> parts;
  for (std::size_t row = 0; row < batch.lengths.size(); ++row)
    if (batch.lengths[row] != 0)
      parts.push_back({.begin = static_cast<std::int64_t>(row) * batch.ids.size(1), .length = batch.lengths[row]});
  return parts;
}

}  // namespace

// The shares sum to one, as those of the tokens' losses do: a micro-batch has the loss that transformers gives it, and
// of the step's loss the part that its tokens, or pairs, are.
void Session::Impl::watch_balance(const Objective& objective, std::vector<Shared>& shared) {
  balanced.clear();
  balances.clear();
  if (model->spec().config.experts.balance == 0) return;
  balances.resize(shared.size());
  for (std::size_t i = 0; i < shared.size(); ++i) {
    const MicroBatch& batch = objective.batches[i];
    const std::int64_t own = options.loss.pairs() ? count_pairs(options.loss, {batch}).pairs : batch.target_tokens();
    const std::int64_t all = options.loss.pairs() ? objective.pairs.pairs : objective.targets;
    balanced.push_back({.parts = counted_tokens(batch),
                        .tokens = batch.ids.numel(),
                        .share = static_cast<double>(own) / static_cast<double>(std::max<std::int64_t>(all, 1))});
    shared[i].watch.balance = &balances[i];
  }
}

// What the computation that is about to run tells and takes.
void Session::Impl::expect_balance(int stage, int number, bool backward) {
  if (balanced.empty()) return;
  const auto together = static_cast<std::size_t>(plan.layout->stages()[stage].together);
  const std::size_t first = static_cast<std::size_t>(number) * together;
  const std::size_t count = std::min(together, balanced.size() - first);
  models::RouterBalance& balance = balances[first];
  balance = {};
  balance.found.resize(count);
  std::int64_t begin = 0;
  for (std::size_t i = 0; i < count; begin += balanced[first + i++].tokens) {
    const Balanced& of = balanced[first + i];
    for (const models::CountedTokens& part : of.parts)
      balance.parts.push_back({.micro_batch = i, .begin = begin + part.begin, .length = part.length});
    if (backward) balance.gradients.push_back(of.loads.gradient(model->spec().config.experts.balance * of.share));
  }
}

// What it told. A stage without a router tells nothing.
void Session::Impl::take_balance(int stage, int number) {
  if (balanced.empty()) return;
  const std::size_t first = static_cast<std::size_t>(number) * plan.layout->stages()[stage].together;
  const std::vector<models::RouterLoads>& found = balances[first].found;
  for (std::size_t i = 0; i < found.size(); ++i)
    if (!found[i].chosen.empty()) balanced[first + i].loads.add(found[i]);
}

double Session::Impl::aux_loss() const {
  double loss = 0;
  for (const Balanced& of : balanced) loss += of.share * of.loads.loss();
  return balanced.empty() ? NAN : loss;
}

}  // namespace tierflow

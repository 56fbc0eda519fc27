// Preference losses against autograd in fp64 over formulas written again here, from the papers.
#include "runtime/base/exception.h"
#include "runtime/models/pair_batch.h"
#include "tests/runtime/models/plain.h"

namespace tierflow::testing {
namespace {

using torch::Tensor;

const std::vector<LossRule> kRules = {{.kind = LossKind::dpo, .beta = 0.3},
                                      {.kind = LossKind::simpo, .beta = 2.0, .simpo_gamma = 0.7},
                                      {.kind = LossKind::orpo, .beta = 0.4}};

// The loss of pairs by the paper, from sums of log-probabilities [pairs], tokens and references.
Tensor paper(const LossRule& rule, const Tensor& chosen, const Tensor& rejected, const Tensor& tokens_chosen,
             const Tensor& tokens_rejected, const Tensor& reference_chosen, const Tensor& reference_rejected) {
  if (rule.kind == LossKind::dpo)
    return -torch::log(
        torch::sigmoid(rule.beta * (chosen - reference_chosen) - rule.beta * (rejected - reference_rejected)));
  const Tensor up = chosen / tokens_chosen, down = rejected / tokens_rejected;
  if (rule.kind == LossKind::simpo)
    return -torch::log(torch::sigmoid(rule.beta * up - rule.beta * down - rule.simpo_gamma));
  const auto odds = [](const Tensor& p) { return p.exp() / (1 - p.exp()); };
  return -rule.beta * torch::log(torch::sigmoid(torch::log(odds(up) / odds(down))));
}

TEST(Pairs, each_rule_is_its_papers_with_its_derivatives) {
  for (const LossRule& rule : kRules)
    for (const double chosen : {-0.3, -7.0, -90.0})
      for (const double rejected : {-0.01, -9.0, -75.0}) {
        const Completion c{.log_probability = chosen, .tokens = 3, .reference = -8},
            r{.log_probability = rejected, .tokens = 5, .reference = -6};
        const auto leaf = [](double value) { return torch::tensor(value, torch::kDouble).requires_grad_(); };
        const Tensor up = leaf(chosen), down = leaf(rejected);
        const auto constant = [](double value) { return torch::tensor(value, torch::kDouble); };
        const Tensor loss =
            paper(rule, up, down, constant(3), constant(5), constant(c.reference), constant(r.reference));
        loss.backward();
        const PairLoss found = pair_loss(rule, c, r);
        const double size = 1e-9 * std::max(1.0, loss.item<double>());
        EXPECT_NEAR(found.loss, loss.item<double>(), size);
        EXPECT_NEAR(found.d_chosen, up.grad().item<double>(), 1e-9);
        EXPECT_NEAR(found.d_rejected, down.grad().item<double>(),
                    1e-9 * std::max(1.0, down.grad().abs().item<double>()));
        EXPECT_EQ(found.reward_chosen,
                  rule.kind == LossKind::dpo ? rule.beta * (chosen + 8) : rule.beta * (chosen / 3));
        EXPECT_EQ(found.reward_rejected,
                  rule.kind == LossKind::dpo ? rule.beta * (rejected + 6) : rule.beta * (rejected / 5));
      }
}

TEST(Pairs, far_apart_completions_have_finite_losses_and_derivatives) {
  for (const LossRule& rule : kRules)
    for (const auto& [chosen, rejected] : {std::pair{-1e6, -0.0}, std::pair{-0.0, -1e6}, std::pair{-0.0, -0.0}}) {
      const PairLoss found =
          pair_loss(rule, {.log_probability = chosen, .tokens = 1}, {.log_probability = rejected, .tokens = 1});
      for (const double value : {found.loss, found.d_chosen, found.d_rejected}) EXPECT_TRUE(std::isfinite(value));
    }
}

// Two pairs: prompts of two tokens, completions of several lengths, padding behind them.
MicroBatch pairs(std::uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  MicroBatch batch{.ids = torch::randint(96, {4, 12}, generator, torch::kLong), .labels = torch::full({4, 12}, -100)};
  const std::vector<std::int64_t> ends = {9, 5, 4, 12};
  for (std::int64_t row = 0; row < 4; ++row)
    for (std::int64_t at = 1; at + 1 < ends[static_cast<std::size_t>(row)]; ++at)
      batch.labels[row][at] = batch.ids[row][at + 1];
  batch.reference = {-30.0, -12.0, -9.0, -45.0};
  return batch;
}

Tensor plain_pair_loss(const LossRule& rule, const ResidentModel& m, const std::vector<Weights>& units,
                       const MicroBatch& batch) {
  const Tensor log_p = torch::log_softmax(plain_logits(m, units, batch, 0), -1);
  const auto of_labels = [&](const Tensor& labels) {
    return log_p.gather(2, labels.clamp_min(0).unsqueeze(2)).squeeze(2) * labels.ge(0);
  };
  const Tensor sums = of_labels(batch.labels).sum(1), counts = batch.labels.ge(0).sum(1).to(torch::kDouble);
  const Tensor reference = torch::tensor(batch.reference, torch::kDouble);
  const auto half = [](const Tensor& rows, std::int64_t which) { return rows.slice(0, which, torch::nullopt, 2); };
  Tensor loss = paper(rule, half(sums, 0), half(sums, 1), half(counts, 0), half(counts, 1), half(reference, 0),
                      half(reference, 1))
                    .mean();
  if (rule.kind != LossKind::orpo) return loss;
  // The cross-entropy of the chosen rows, prompts too: rows 0 and 2 have 9 and 4 tokens.
  const Tensor next = batch.ids.roll(-1, 1);
  const Tensor all = log_p.gather(2, next.unsqueeze(2)).squeeze(2);
  return loss - (all[0].narrow(0, 0, 8).sum() + all[2].narrow(0, 0, 3).sum()) / 11;
}

TEST(Pairs, gradients_are_plain_autograds_of_whole_and_tiled_heads) {
  for (const LossRule& rule : kRules)
    for (const char* name : {"llama", "gemma2"})
      for (const Tiling& tiling : {Tiling{}, kTiled}) {
        ResidentModel m = resident(case_called(name), torch::kDouble, 0.2, tiling);
        const MicroBatch given = pairs(3);
        MicroBatch counted = given;
        counted.labels = head_labels(rule, given);
        const Shared shared = m.model->share(counted, torch::kCPU);
        const int last = m.stages() - 1;
        const Tensor losses =
            m.model->head_scores(m.bind(last, m.units), m.forward(shared, false).back(), shared).losses;
        m.forward_backward(counted, pair_scale(rule, given, losses, count_pairs(rule, {given})));

        std::vector<Weights> leaves = m.units;
        for (auto& unit : leaves)
          for (auto& weight : unit) weight = weight.detach().clone().requires_grad_();
        const Tensor plain = plain_pair_loss(rule, m, leaves, given);
        EXPECT_NEAR(pair_totals(rule, given, losses).mean_loss(), plain.item<double>(), 1e-9);
        plain.backward();
        for (std::size_t u = 0; u < leaves.size(); ++u)
          for (std::size_t t = 0; t < leaves[u].size(); ++t) {
            EXPECT_GT(leaves[u][t].grad().norm().item<double>(), 0);
            EXPECT_LT(relative_error(m.gradients[u][t], leaves[u][t].grad()), 1e-6)
                << m.spec().units[u].tensors[t].name << " of " << name << ", rule " << static_cast<int>(rule.kind);
          }
      }
}

// A step of two micro-batches has the gradient of one of both.
TEST(Pairs, what_a_step_divides_by_is_counted_over_its_micro_batches) {
  for (const LossRule& rule : kRules) {
    const MicroBatch first = pairs(3), second = pairs(4);
    MicroBatch both{.ids = torch::cat({first.ids, second.ids}), .labels = torch::cat({first.labels, second.labels})};
    both.reference = first.reference;
    both.reference.insert(both.reference.end(), second.reference.begin(), second.reference.end());
    const PairCounts counts = count_pairs(rule, {first, second});
    EXPECT_EQ(counts.pairs, 4);
    EXPECT_EQ(counts.nll_tokens, rule.adds_chosen_nll() ? 22 : 0);
    const Tensor losses = torch::rand({96}, torch::kDouble) + 0.1;
    const auto scales = [&](const MicroBatch& batch, const Tensor& its) {
      const models::TokenScale scale = pair_scale(rule, batch, its, counts);
      std::vector<double> each;
      scale.for_each_stretch(0, its.numel(), [&](std::int64_t, std::int64_t tokens, double here) {
        each.insert(each.end(), static_cast<std::size_t>(tokens), here);
      });
      return each;
    };
    std::vector<double> apart = scales(first, losses.narrow(0, 0, 48));
    const std::vector<double> rest = scales(second, losses.narrow(0, 48, 48));
    apart.insert(apart.end(), rest.begin(), rest.end());
    EXPECT_EQ(apart, scales(both, losses));
    PairTotals totals = pair_totals(rule, first, losses.narrow(0, 0, 48));
    totals.add(pair_totals(rule, second, losses.narrow(0, 48, 48)));
    EXPECT_NEAR(totals.mean_loss(), pair_totals(rule, both, losses).mean_loss(), 1e-12);
  }
}

TEST(Pairs, losses_of_tokens_that_do_not_count_are_not_read) {
  const LossRule rule{.kind = LossKind::orpo};
  const MicroBatch batch = pairs(3);
  const Tensor losses = torch::rand({48}, torch::kDouble) + 0.1;
  const PairTotals clean = pair_totals(rule, batch, losses);
  losses[11] = INFINITY;  // padding of the first chosen row
  const PairTotals found = pair_totals(rule, batch, losses);
  EXPECT_EQ(found.nll, clean.nll);
  EXPECT_TRUE(std::isfinite(found.mean_loss()));
}

TEST(Pairs, what_are_no_pairs_is_refused) {
  const LossRule rule{.kind = LossKind::dpo};
  MicroBatch odd = pairs(3), empty = pairs(3), bare = pairs(3);
  odd.ids = odd.ids.narrow(0, 0, 3);
  odd.labels = odd.labels.narrow(0, 0, 3);
  empty.labels[1].fill_(-100);
  bare.reference.clear();
  for (const MicroBatch& wrong : {odd, empty, bare}) EXPECT_THROW(count_pairs(rule, {wrong}), Exception);
  EXPECT_EQ(count_pairs({.kind = LossKind::simpo}, {bare}).pairs, 2);
}

}  // namespace
}  // namespace tierflow::testing

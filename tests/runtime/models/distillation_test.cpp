// The loss against a teacher's tokens against autograd over its formula, written again here; and the most likely
// tokens.
#include "runtime/base/exception.h"
#include "runtime/models/ops.h"
#include "runtime/models/top_logits.h"
#include "tests/runtime/models/plain.h"

namespace tierflow::testing {
namespace {

using torch::Tensor;

constexpr std::int64_t kTop = 5;
const std::vector<Distillation> kRules = {{.top = kTop},
                                          {.top = kTop, .alpha = 0.7, .ce_alpha = 0.4, .temperature = 2.5},
                                          {.top = kTop, .alpha = 1.5, .ce_alpha = 0, .temperature = 0.6}};

// Rows whose teacher names the label, and rows whose teacher does not.
MicroBatch taught(std::uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  MicroBatch tokens = batch(2, 12);
  std::vector<Tensor> ids;
  for (std::int64_t i = 0; i < 24; ++i) ids.push_back(torch::randperm(96, generator, torch::kInt).narrow(0, 0, kTop));
  tokens.teacher_ids = torch::stack(ids).view({2, 12, kTop}).contiguous();
  for (std::int64_t i = 6; i < 12; ++i)
    if (!tokens.teacher_ids[0][i].eq(tokens.labels[0][i]).any().item<bool>())
      tokens.teacher_ids[0][i][i % kTop] = tokens.labels[0][i].to(torch::kInt);
  tokens.teacher_log_probabilities =
      std::get<0>((torch::randn({2, 12, kTop}, generator, torch::kDouble) * 2).log_softmax(2).sort(2, true))
          .to(torch::kHalf);
  return tokens;
}

Shared shared_with_teacher(const ResidentModel& m, const MicroBatch& tokens, const Distillation& rule) {
  Shared shared = m.model->share(tokens, torch::kCPU);
  shared.teacher = models::SoftTargets(tokens.teacher_ids, tokens.teacher_log_probabilities, rule);
  return shared;
}

struct Parts {
  Tensor ce, kd;  // sums over the positions that count
};

// By the formula, over logits [rows, sequence, vocab].
Parts plain_parts(const Tensor& logits, const MicroBatch& tokens, const Distillation& rule) {
  const Tensor counts = tokens.labels.ge(0), log_p = torch::log_softmax(logits, -1);
  const Tensor ce = -log_p.gather(2, tokens.labels.clamp_min(0).unsqueeze(2)).squeeze(2);
  const Tensor p = tokens.teacher_log_probabilities.to(torch::kDouble).exp().pow(1 / rule.temperature);
  const Tensor q = p / p.sum(2, true);
  const Tensor student =
      torch::log_softmax(logits / rule.temperature, -1).gather(2, tokens.teacher_ids.to(torch::kLong));
  const Tensor kd = rule.temperature * rule.temperature * (q * (q.log() - student)).sum(2);
  return {.ce = (ce * counts).sum(), .kd = (kd * counts).sum()};
}

HeadResult forward_backward(ResidentModel& m, const Shared& shared, double scale) {
  const std::vector<Carry> inputs = m.forward(shared, true);
  const int last = m.stages() - 1;
  HeadResult head =
      m.model->head_loss_and_backward(m.bind(last, m.units), m.bind(last, m.gradients), inputs.back(), shared, scale);
  Carry d = head.d_carry;
  for (int stage = last - 1; stage >= 0; --stage) {
    const auto at = static_cast<std::size_t>(stage);
    d = m.model->backward(stage, m.bind(stage, m.units), m.bind(stage, m.gradients),
                          taken_by_backward(m.spec().stages[at], inputs[at]), shared, d);
  }
  return head;
}

TEST(Distillation, loss_and_gradients_are_autograds_of_whole_and_tiled_heads) {
  for (const Distillation& rule : kRules)
    for (const char* name : {"llama", "gemma2"})
      for (const Tiling& tiling : {Tiling{}, kTiled}) {
        ResidentModel m = resident(case_called(name), torch::kDouble, 0.2, tiling);
        const MicroBatch tokens = taught(3);
        const HeadResult found = forward_backward(m, shared_with_teacher(m, tokens, rule), 0.25);

        std::vector<Weights> leaves = m.units;
        for (auto& unit : leaves)
          for (auto& weight : unit) weight = weight.detach().clone().requires_grad_();
        const Parts plain = plain_parts(plain_logits(m, leaves, tokens, 0), tokens, rule);
        const Tensor loss = rule.ce_alpha * plain.ce + rule.alpha * plain.kd;
        EXPECT_NEAR(found.ce_sum.item<double>(), plain.ce.item<double>(), 1e-9);
        EXPECT_NEAR(found.kd_sum.item<double>(), plain.kd.item<double>(), 1e-9);
        EXPECT_NEAR(found.loss_sum.item<double>(), loss.item<double>(), 1e-9);
        (0.25 * loss).backward();
        for (std::size_t u = 0; u < leaves.size(); ++u)
          for (std::size_t t = 0; t < leaves[u].size(); ++t) {
            EXPECT_GT(leaves[u][t].grad().norm().item<double>(), 0);
            EXPECT_LT(relative_error(m.gradients[u][t], leaves[u][t].grad()), 1e-6)
                << m.spec().units[u].tensors[t].name << " of " << name << " at temperature " << rule.temperature;
          }
      }
}

// The gradient of the logits themselves, where bf16's kernels compute it: within a rounding of the exact one.
TEST(Distillation, the_gradient_of_bf16_logits_is_rounded_once) {
  const MicroBatch tokens = taught(4);
  const Tensor labels = tokens.labels.view(-1), logits = (torch::randn({24, 96}) * 3).to(torch::kBFloat16);
  for (const Distillation& rule : kRules) {
    const models::SoftTargets teacher(tokens.teacher_ids, tokens.teacher_log_probabilities, rule);
    Tensor exact = logits.to(torch::kDouble).requires_grad_();
    const Parts plain = plain_parts(exact.view({2, 12, 96}), tokens, rule);
    (0.125 * (rule.ce_alpha * plain.ce + rule.alpha * plain.kd)).backward();
    const Tensor d_exact = exact.grad();
    for (const std::int64_t width : {96, 32}) {
      const Tensor sums = models::no_softmax_sums(24, torch::kCPU), soft = teacher.no_sums();
      for (std::int64_t first = 0; first < 96; first += width)
        teacher.add(logits.narrow(1, first, width).contiguous(), labels, first, sums, soft);
      const auto losses = teacher.losses(sums, soft, labels);
      EXPECT_NEAR(losses.ce.sum().item<double>(), plain.ce.item<double>(), 1e-3);
      EXPECT_NEAR(losses.kd.sum().item<double>(), plain.kd.item<double>(), 1e-3);
      std::vector<Tensor> tiles;
      for (std::int64_t first = 0; first < 96; first += width) {
        tiles.push_back(logits.narrow(1, first, width).clone());
        teacher.gradient(tiles.back(), labels, first, teacher.factors(sums, soft, labels, 0.125));
      }
      const Tensor wrong = (torch::cat(tiles, 1).to(torch::kDouble) - d_exact).abs();
      EXPECT_TRUE(wrong.le(d_exact.abs() / 256 + 1e-8).all().item<bool>()) << wrong.max().item<double>();
    }
  }
}

TEST(Distillation, positions_that_do_not_count_contribute_nothing) {
  for (const Tiling& tiling : {Tiling{}, kTiled})
    for (const Distillation& rule : kRules) {
      ResidentModel m = resident(cases()[0], torch::kBFloat16, 0.2, tiling),
                    other = resident(cases()[0], torch::kBFloat16, 0.2, tiling);
      const MicroBatch tokens = taught(3);
      MicroBatch changed = tokens;
      changed.teacher_ids = tokens.teacher_ids.clone();
      changed.teacher_log_probabilities = tokens.teacher_log_probabilities.clone();
      changed.teacher_ids.index_put_({0, torch::indexing::Slice(2, 5)}, 7);
      changed.teacher_log_probabilities.index_put_({0, torch::indexing::Slice(2, 5)}, NAN);
      const HeadResult a = forward_backward(m, shared_with_teacher(m, tokens, rule), 1);
      const HeadResult b = forward_backward(other, shared_with_teacher(other, changed, rule), 1);
      EXPECT_EQ(a.loss_sum.item<double>(), b.loss_sum.item<double>());
      for (std::size_t u = 0; u < m.gradients.size(); ++u)
        for (std::size_t t = 0; t < m.gradients[u].size(); ++t)
          EXPECT_TRUE(torch::equal(m.gradients[u][t], other.gradients[u][t]));
      changed.labels.fill_(-100);
      other.zero_gradients();
      EXPECT_EQ(forward_backward(other, shared_with_teacher(other, changed, rule), 1).loss_sum.item<double>(), 0);
      for (const auto& unit : other.gradients)
        for (const Tensor& gradient : unit) EXPECT_EQ(gradient.abs().sum().item<double>(), 0);
    }
}

// What a teacher cut off: -inf in fp16.
TEST(Distillation, a_token_without_probability_counts_as_none) {
  MicroBatch tokens = taught(5);
  tokens.teacher_log_probabilities.select(2, kTop - 1).fill_(-INFINITY);
  for (const Distillation& rule : kRules) {
    ResidentModel m = resident(cases()[0], torch::kDouble);
    const HeadResult found = forward_backward(m, shared_with_teacher(m, tokens, rule), 1);
    EXPECT_TRUE(std::isfinite(found.kd_sum.item<double>()));
    MicroBatch fewer = tokens;
    fewer.teacher_ids = tokens.teacher_ids.narrow(2, 0, kTop - 1);
    fewer.teacher_log_probabilities = tokens.teacher_log_probabilities.narrow(2, 0, kTop - 1);
    EXPECT_NEAR(forward_backward(m, shared_with_teacher(m, fewer, rule), 1).kd_sum.item<double>(),
                found.kd_sum.item<double>(), 1e-9);
  }
}

// The largest logits in falling order, of equal ones the first: for every type, wherever tiles begin.
TEST(TopLogits, are_the_largest_and_the_first_of_equal_ones) {
  torch::manual_seed(3);
  const Tensor logits = torch::randint(-40, 40, {19, 250}).to(torch::kFloat) / 8;  // many are equal
  const auto [values, places] = logits.sort(/*stable=*/true, 1, /*descending=*/true);
  for (const std::int64_t top : {1, 7, 64, 250})
    for (const auto type : {torch::kBFloat16, torch::kFloat})
      for (const std::int64_t width : {250, 100, 3}) {
        const models::TopLogits found = models::no_top_logits(19, top, torch::kCPU);
        for (std::int64_t first = 0; first < 250; first += width)
          models::top_logits(logits.narrow(1, first, std::min(width, 250 - first)).to(type).contiguous(), first, found);
        EXPECT_TRUE(torch::equal(found.values, values.narrow(1, 0, top)));
        EXPECT_TRUE(torch::equal(found.ids, places.narrow(1, 0, top).to(torch::kInt)));
      }
}

TEST(TopLogits, an_evaluation_hands_on_their_log_probabilities) {
  for (const Tiling& tiling : {Tiling{}, kTiled}) {
    const ResidentModel m = resident(case_called("gemma2"), torch::kDouble, 0.2, tiling);
    const MicroBatch tokens = batch(2, 12);
    Shared shared = m.model->share(tokens, torch::kCPU);
    shared.top = kTop;
    const int last = m.stages() - 1;
    const HeadScores scores = m.model->head_scores(m.bind(last, m.units), m.forward(shared, false).back(), shared);
    const torch::NoGradGuard no_grad;
    const Tensor log_p = torch::log_softmax(plain_logits(m, m.units, tokens, 0), -1).view({24, 96});
    const auto [values, places] = log_p.topk(kTop, 1);
    const Tensor counts = tokens.labels.view(-1).ge(0);
    EXPECT_TRUE(torch::equal(scores.top_ids.to(torch::kLong).index({counts}), places.index({counts})));
    EXPECT_LT((scores.top_log_probabilities - values).index({counts}).abs().max().item<double>(), 1e-6);
  }
}

}  // namespace
}  // namespace tierflow::testing

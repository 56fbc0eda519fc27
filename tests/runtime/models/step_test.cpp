// What the session relies on: the same bits again, chunks that do not matter, weights rebound in one slot.
#include <array>

#include "runtime/models/loss_head.h"
#include "runtime/models/tensor_index.h"
#include "tests/runtime/models/fixture.h"

namespace tierflow::testing {
namespace {

class Step : public EveryModel {};

TEST_P(Step, repeats_its_bits) {
  ResidentModel m = resident(GetParam(), torch::kBFloat16);
  const MicroBatch tokens = batch(3, 40);
  const double loss = m.forward_backward(tokens, 0.5, true, 7);
  const std::vector<std::vector<torch::Tensor>> first = m.gradients;
  std::vector<std::vector<torch::Tensor>> kept;
  for (auto& unit : m.gradients) {
    kept.emplace_back();
    for (auto& gradient : unit) kept.back().push_back(gradient.clone());
  }
  m.zero_gradients();
  EXPECT_EQ(loss, m.forward_backward(tokens, 0.5, true, 7));
  for (std::size_t u = 0; u < kept.size(); ++u) {
    for (std::size_t t = 0; t < kept[u].size(); ++t) {
      EXPECT_TRUE(torch::equal(kept[u][t], m.gradients[u][t])) << m.spec().units[u].tensors[t].name;
    }
  }
}

// One slot for all blocks of a kind, overwritten after each call, as the session streams them: the gradients are those
// of resident weights.
TEST_P(Step, blocks_of_a_kind_may_share_one_slot) {
  ResidentModel m = resident(GetParam(), torch::kBFloat16);
  const MicroBatch tokens = batch(2, 24);
  const double loss = m.forward_backward(tokens, 1.0, true, 3);

  const Shared shared = m.model->share(tokens, torch::kCPU);
  const int last = m.stages() - 1;
  // A layer with experts is two stages of other shapes, each with a slot of its own.
  const auto kind = [&](int stage) {
    return stage > 1 && m.units[static_cast<std::size_t>(stage)].size() != m.units[1].size() ? 1 : 0;
  };
  std::array<Weights, 2> slots;
  std::array<std::vector<torch::Tensor>, 2> sums_of;
  for (int stage = last - 1; stage > 0; --stage) {
    slots[kind(stage)].clear();
    sums_of[kind(stage)].clear();
    for (const auto& weight : m.units[static_cast<std::size_t>(stage)]) {
      slots[kind(stage)].push_back(torch::empty_like(weight));
      sums_of[kind(stage)].push_back(torch::empty(weight.sizes(), torch::kFloat));
    }
  }
  const torch::NoGradGuard no_grad;
  const auto load = [&](int stage) {
    Weights& slot = slots[kind(stage)];
    for (std::size_t t = 0; t < slot.size(); ++t) slot[t].copy_(m.units[static_cast<std::size_t>(stage)][t]);
  };
  const auto seed = [&](int stage) { torch::manual_seed(3 + static_cast<std::uint64_t>(stage)); };
  std::vector<Carry> inputs = {{}};
  for (int stage = 0; stage < last; ++stage) {
    if (stage > 0) load(stage);
    seed(stage);
    Weights& slot = slots[kind(stage)];
    inputs.push_back(m.model->forward(stage, stage == 0 ? m.bind(0, m.units) : slot, inputs.back(), shared, true));
    for (auto& weight : slot) weight.fill_(NAN);
  }
  std::vector<std::vector<torch::Tensor>> head = m.gradients;
  for (auto& unit : head) {
    for (auto& gradient : unit) gradient = torch::zeros_like(gradient);
  }
  HeadResult result =
      m.model->head_loss_and_backward(m.bind(last, m.units), m.bind(last, head), inputs.back(), shared, 1.0);
  EXPECT_EQ(loss, result.loss_sum.item<double>());
  Carry d = result.d_carry;
  for (int stage = last - 1; stage > 0; --stage) {
    load(stage);
    Weights& slot = slots[kind(stage)];
    std::vector<torch::Tensor>& sums = sums_of[kind(stage)];
    for (auto& sum : sums) sum.zero_();
    seed(stage);
    d = m.model->backward(stage, slot, sums, inputs[static_cast<std::size_t>(stage)], shared, d);
    for (auto& weight : slot) weight.fill_(NAN);
    for (std::size_t t = 0; t < sums.size(); ++t) {
      EXPECT_TRUE(torch::equal(sums[t], m.gradients[static_cast<std::size_t>(stage)][t]));
    }
  }
}

// What a block keeps changes no bit, whole or restored of what is essential, and the weights may move between its
// forward and its backward.
void expect_keeping_changes_nothing(const Case& which, torch::ScalarType type, const Tiling& tiling,
                                    const MicroBatch& tokens) {
  ResidentModel m = resident(which, type, 0.2, tiling);
  const Shared shared = m.model->share(tokens, torch::kCPU);
  const std::vector<Carry> inputs = m.forward(shared, true, 11);
  const torch::NoGradGuard no_grad;
  int keeping = 0;
  for (int stage = 1; stage + 1 < m.stages(); ++stage) {
    if (!m.model->can_keep(stage)) continue;
    ++keeping;
    const auto at = static_cast<std::size_t>(stage);
    const auto seed = [&] { torch::manual_seed(11 + at); };
    const Carry d_out = {torch::randn(inputs[at + 1][0].sizes()).to(type)};
    m.zero_gradients();
    seed();
    const Carry d =
        m.model->backward(stage, m.bind(stage, m.units), m.bind(stage, m.gradients), inputs[at], shared, d_out);
    std::vector<torch::Tensor> expected;
    for (const torch::Tensor& gradient : m.bind(stage, m.gradients)) expected.push_back(gradient.clone());
    for (const bool restored : {false, true}) {
      m.zero_gradients();
      Weights slot;
      for (const torch::Tensor& weight : m.bind(stage, m.units)) slot.push_back(weight.clone());
      Carry carry = inputs[at];
      seed();
      auto kept = m.model->forward_keeping(stage, slot, carry, shared);
      ASSERT_NE(kept, nullptr);
      EXPECT_TRUE(torch::equal(carry[0], inputs[at + 1][0]));
      for (torch::Tensor& weight : slot) weight.fill_(NAN);
      if (restored) {
        std::vector<torch::Tensor> moved;
        for (const torch::Tensor& essential : kept->essentials()) moved.push_back(essential.detach().clone());
        kept.reset();
        seed();
        kept = m.model->restore(stage, m.bind(stage, m.units), inputs[at], shared, moved);
      }
      const Carry got = m.model->backward_kept(stage, m.bind(stage, m.units), m.bind(stage, m.gradients), inputs[at],
                                               shared, d_out, std::move(kept));
      EXPECT_TRUE(torch::equal(got[0], d[0]));
      const std::vector<torch::Tensor> sums = m.bind(stage, m.gradients);
      for (std::size_t t = 0; t < sums.size(); ++t) EXPECT_TRUE(torch::equal(sums[t], expected[t]));
    }
  }
  EXPECT_GT(keeping, 0);
}

TEST_P(Step, keeping_activations_changes_no_bit) {
  for (const auto type : {torch::kFloat, torch::kBFloat16}) {
    expect_keeping_changes_nothing(GetParam(), type, {}, batch(2, 40));
    expect_keeping_changes_nothing(GetParam(), type, kTiled, batch(2, 40));
    expect_keeping_changes_nothing(GetParam(), type, {}, packed({{40}, {11, 1, 28}}));
  }
}

TEST_P(Step, evaluation_draws_no_random_numbers) {
  const ResidentModel m = resident(GetParam(), torch::kBFloat16);
  const Shared shared = m.model->share(batch(1, 24), torch::kCPU);
  const auto once = m.forward(shared, false, 1), again = m.forward(shared, false, 2);
  for (std::size_t i = 1; i < once.size(); ++i) EXPECT_TRUE(torch::equal(once[i][0], again[i][0]));
}

// head_scores and head_loss_and_backward give the same loss to the bit.
TEST_P(Step, evaluation_is_trainings_loss) {
  ResidentModel m = resident(GetParam(), torch::kBFloat16);
  const MicroBatch tokens = batch(2, 24);
  const Shared shared = m.model->share(tokens, torch::kCPU);
  const auto inputs = m.forward(shared, true, 9);
  EXPECT_EQ(m.model->head_scores(m.bind(m.stages() - 1, m.units), inputs.back(), shared).loss_sum,
            m.forward_backward(tokens, 1.0, true, 9));
}

INSTANTIATE_TEST_SUITE_P(models, Step, ::testing::ValuesIn(cases("0.2")), case_name);

TEST(Decoder, each_layer_has_its_own_window) {
  const ResidentModel m = resident(case_called("gemma2"), torch::kDouble);
  const Shared shared = m.model->share(batch(1, 12), torch::kCPU);
  const torch::Tensor hidden = torch::randn({1, 12, 32}, torch::kDouble), other = hidden.clone();
  other.select(1, 0).add_(1.0);
  for (const int stage : {1, 2}) {
    const auto last = [&](const torch::Tensor& in) {
      return m.model->forward(stage, m.bind(stage, m.units), {in}, shared, false).at(0).select(1, 11);
    };
    EXPECT_EQ(torch::equal(last(hidden), last(other)), stage == 1) << "the window is of the first layer alone";
  }
}

struct SmallHead {
  Case which = cases()[0];
  ModelSpec spec = parse_model_spec(which.json, which.name);
  int stage = static_cast<int>(spec.stages.size()) - 1;
  models::TensorIndex index{spec, stage};
  models::LossHead head{
      models::Norm(NormKind::rms, 1e-5, index, "model.norm"), {}, index, "lm_head.weight", "embed_tokens.weight"};
};

TEST(LossHead, chunks_do_not_matter) {
  const auto [which, spec, stage, index, head] = SmallHead();
  for (const auto type : {torch::kDouble, torch::kBFloat16}) {
    ResidentModel m = resident(which, type);
    const MicroBatch tokens = batch(3, 33);
    const torch::Tensor hidden = m.forward(m.model->share(tokens, torch::kCPU), true).back()[0];
    const Weights weights = m.bind(stage, m.units);
    std::vector<torch::Tensor> losses, d_hidden, d_output;
    for (const std::int64_t rows : {0, 16, 40, 99}) {
      m.zero_gradients();
      const HeadResult result =
          head.loss_and_backward(weights, m.bind(stage, m.gradients), hidden, tokens.labels, 0.1, rows);
      const HeadScores scores = head.scores(weights, hidden, tokens.labels, rows);
      EXPECT_DOUBLE_EQ(result.loss_sum.item<double>(), scores.loss_sum);
      EXPECT_NEAR(scores.losses.sum().item<double>(), scores.loss_sum, 1e-9 * scores.loss_sum);
      losses.push_back(scores.losses);
      d_hidden.push_back(result.d_carry[0].clone());
      d_output.push_back(m.gradients[static_cast<std::size_t>(spec.stages.back().units[0])][0].clone());
    }
    const double tolerance = type == torch::kDouble ? 1e-12 : 5e-3;
    for (std::size_t i = 1; i < losses.size(); ++i) {
      EXPECT_LT(relative_error(losses[i], losses[0]), tolerance);
      EXPECT_LT(relative_error(d_hidden[i], d_hidden[0]), tolerance);
      EXPECT_LT(relative_error(d_output[i], d_output[0]), tolerance);
    }
  }
}

TEST(LossHead, a_hit_is_the_largest_logit) {
  const auto [which, spec, stage, index, head] = SmallHead();
  ResidentModel m = resident(which, torch::kBFloat16);
  const MicroBatch tokens = batch(3, 33);
  const torch::Tensor hidden = m.forward(m.model->share(tokens, torch::kCPU), true).back()[0];
  const Weights weights = m.bind(stage, m.units);
  torch::Tensor labels = head.logits(weights, hidden.flatten(0, 1)).argmax(1);
  EXPECT_TRUE(head.scores(weights, hidden, labels, 16).hits.all().item<bool>());
  labels[5] = -100;
  labels[40] = (labels[40] + 1) % 7;
  const torch::Tensor hits = head.scores(weights, hidden, labels, 16).hits;
  EXPECT_EQ(hits.sum().item<std::int64_t>(), labels.size(0) - 2);
  EXPECT_FALSE(hits[5].item<bool>() || hits[40].item<bool>());
}

TEST(LossHead, chunk_rows_come_from_the_vocabulary) {
  EXPECT_EQ(models::head_chunk_rows(32000, false), 256);
  EXPECT_EQ(models::head_chunk_rows(151936, false), 48);
  EXPECT_EQ(models::head_chunk_rows(100'000'000, false), 16);
  EXPECT_GT(models::head_chunk_rows(151936, true), 400);
}

TEST(LossHead, labels_that_do_not_count_give_nothing) {
  ResidentModel m = resident(cases()[0], torch::kBFloat16);
  MicroBatch tokens = batch(1, 16);
  tokens.labels.fill_(-100);
  EXPECT_EQ(tokens.target_tokens(), 0);
  EXPECT_EQ(m.forward_backward(tokens, 1.0), 0.0);
  for (const auto& unit : m.gradients) {
    for (const auto& gradient : unit) EXPECT_EQ(gradient.abs().sum().item<double>(), 0.0);
  }
}

TEST(MicroBatch, counts_its_targets) {
  EXPECT_EQ(batch(2, 16).target_tokens(), 2 * 16 - 3);
}

TEST(Embedding, refuses_sequences_beyond_its_positions) {
  const ResidentModel m = resident(case_called("gpt2"), torch::kBFloat16);
  const Shared shared = m.model->share(batch(1, 65), torch::kCPU);
  EXPECT_ANY_THROW(m.model->forward(0, m.bind(0, m.units), {}, shared, false));
}

}  // namespace
}  // namespace tierflow::testing

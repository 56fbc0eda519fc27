// Attention whose result and sums are kept or moved: here by torch's flash kernel of the CPU, called as those of a GPU
// are.
#include "runtime/models/device_attention.h"

#include "tests/runtime/models/fixture.h"

namespace tierflow::testing {
namespace {

using models::AttentionGradient;
using models::AttentionRules;
using models::BlockAttention;
using torch::Tensor;

// Documents one by one; windows by a mask, heads repeated where several share keys.
class CpuFlash final : public models::KeptAttention {
 public:
  mutable int forwards = 0, backwards = 0;
  std::string_view name() const override { return "cpu flash"; }

  BlockAttention forward(const Tensor& q, const Tensor& k, const Tensor& v,
                         const AttentionRules& rules) const override {
    ++forwards;
    std::vector<Tensor> out, lse;
    for (const Document& of : documents(q, rules)) {
      const auto [o, l] = at::_scaled_dot_product_flash_attention_for_cpu(
          heads(q, of), repeated(k, of, q), repeated(v, of, q), 0.0, !mask(q, of, rules), mask(q, of, rules),
          rules.scale_of(q.size(3)));
      out.push_back(o.transpose(1, 2).reshape({-1, q.size(2), q.size(3)}));
      lse.push_back(l.transpose(1, 2).reshape({-1, q.size(2)}));
    }
    return {torch::cat(out).view(q.sizes()), torch::cat(lse)};
  }
  Tensor by_token(const Tensor& lse, const Tensor& q) const override {
    return lse.view({q.size(0), q.size(1), q.size(2)});
  }

  AttentionGradient backward(const Tensor& d_out, const Tensor& q, const Tensor& k, const Tensor& v,
                             const BlockAttention& made, const AttentionRules& rules) const override {
    ++backwards;
    std::vector<Tensor> d_q, d_k, d_v;
    std::int64_t token = 0;
    for (const Document& of : documents(q, rules)) {
      const Tensor lse =
          made.lse.narrow(0, token, of.length).view({1, of.length, q.size(2)}).transpose(1, 2).contiguous();
      token += of.length;
      const auto [a, b, c] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
          heads(d_out, of), heads(q, of), repeated(k, of, q), repeated(v, of, q), heads(made.out, of), lse, 0.0,
          !mask(q, of, rules), mask(q, of, rules), rules.scale_of(q.size(3)));
      d_q.push_back(a.transpose(1, 2).flatten(0, 1));
      for (const auto& [d, all] : {std::pair(b, &d_k), std::pair(c, &d_v)})
        all->push_back(d.transpose(1, 2).view({of.length, k.size(2), -1, k.size(3)}).sum(2));
    }
    return {.q = torch::cat(d_q).view(q.sizes()),
            .k = torch::cat(d_k).view(k.sizes()),
            .v = torch::cat(d_v).view(v.sizes())};
  }

 private:
  static std::vector<Document> documents(const Tensor& q, const AttentionRules& rules) {
    if (!rules.documents.empty()) return rules.documents;
    std::vector<Document> rows;
    for (std::int64_t row = 0; row < q.size(0); ++row) rows.push_back({.row = row, .length = q.size(1)});
    return rows;
  }
  static Tensor heads(const Tensor& x, const Document& of) {
    return x.narrow(0, of.row, 1).narrow(1, of.begin, of.length).transpose(1, 2);
  }
  static Tensor repeated(const Tensor& x, const Document& of, const Tensor& q) {
    return heads(x, of).repeat_interleave(q.size(2) / x.size(2), 1);
  }
  static std::optional<Tensor> mask(const Tensor& q, const Document& of, const AttentionRules& rules) {
    if (rules.window <= 0 || rules.window >= of.length) return std::nullopt;
    const Tensor seen = torch::ones({of.length, of.length}, torch::kBool).tril().triu(1 - rules.window);
    return torch::zeros({of.length, of.length}, q.options().requires_grad(false))
        .masked_fill(seen.logical_not(), -INFINITY);
  }
};

struct Chosen {
  std::shared_ptr<CpuFlash> attention = std::make_shared<CpuFlash>();
  std::set<std::string> ran;
  Shared share(const ResidentModel& m, const MicroBatch& tokens) {
    Shared shared = m.model->share(tokens, torch::kCPU);
    shared.attention = {.by = attention, .ran = &ran};
    return shared;
  }
};

class Kept : public ::testing::TestWithParam<const char*> {};

// Kept, swapped and computed again have the same bits, the forward alone too, and nothing that was kept or swapped is
// computed again.
TEST_P(Kept, attention_is_computed_once) {
  for (const auto type : {torch::kBFloat16, torch::kFloat})
    for (const MicroBatch& tokens : {batch(2, 40), packed({{40}, {11, 1, 28}})}) {
      ResidentModel m = resident(case_called(GetParam()), type);
      Chosen chosen;
      const Shared shared = chosen.share(m, tokens);
      const std::vector<Carry> inputs = m.forward(shared, true, 11);
      EXPECT_EQ(chosen.ran, std::set<std::string>{"cpu flash"});
      const torch::NoGradGuard no_grad;
      for (int stage = 1; stage + 1 < m.stages(); ++stage) {
        const auto at = static_cast<std::size_t>(stage);
        const Carry d_out = {torch::randn(inputs[at + 1][0].sizes()).to(type)};
        m.zero_gradients();
        const Carry d =
            m.model->backward(stage, m.bind(stage, m.units), m.bind(stage, m.gradients), inputs[at], shared, d_out);
        std::vector<Tensor> expected;
        for (const Tensor& sum : m.bind(stage, m.gradients)) expected.push_back(sum.clone());
        for (const bool swapped : {false, true}) {
          m.zero_gradients();
          chosen.attention->forwards = chosen.attention->backwards = 0;
          Carry carry = inputs[at];
          auto kept = m.model->forward_keeping(stage, m.bind(stage, m.units), carry, shared);
          EXPECT_TRUE(torch::equal(carry[0], inputs[at + 1][0]));
          if (swapped) {
            std::vector<Tensor> moved;
            for (const Tensor& part : kept->essentials()) moved.push_back(part.detach().clone().contiguous());
            kept.reset();
            kept = m.model->restore(stage, m.bind(stage, m.units), inputs[at], shared, moved);
          }
          const Carry got = m.model->backward_kept(stage, m.bind(stage, m.units), m.bind(stage, m.gradients),
                                                   inputs[at], shared, d_out, std::move(kept));
          EXPECT_EQ(chosen.attention->forwards, 1);
          EXPECT_EQ(chosen.attention->backwards, 1);
          EXPECT_TRUE(torch::equal(got[0], d[0]));
          const std::vector<Tensor> sums = m.bind(stage, m.gradients);
          for (std::size_t t = 0; t < sums.size(); ++t) EXPECT_TRUE(torch::equal(sums[t], expected[t]));
        }
      }
    }
}

// Windows and documents are those of torch's attention.
TEST_P(Kept, attention_gives_what_torchs_gives) {
  for (const MicroBatch& tokens : {batch(2, 40), packed({{40}, {11, 1, 28}})}) {
    ResidentModel m = resident(case_called(GetParam()), torch::kDouble),
                  plain = resident(case_called(GetParam()), torch::kDouble);
    Chosen chosen;
    const double loss = plain.forward_backward(tokens, 0.5);
    const Shared shared = chosen.share(m, tokens);
    const std::vector<Carry> inputs = m.forward(shared, true);
    HeadResult head = m.model->head_loss_and_backward(m.bind(m.stages() - 1, m.units),
                                                      m.bind(m.stages() - 1, m.gradients), inputs.back(), shared, 0.5);
    EXPECT_NEAR(head.loss_sum.item<double>(), loss, 1e-9 * loss);
    Carry d = head.d_carry;
    for (int stage = m.stages() - 2; stage >= 0; --stage)
      d = m.model->backward(stage, m.bind(stage, m.units), m.bind(stage, m.gradients),
                            inputs[static_cast<std::size_t>(stage)], shared, d);
    EXPECT_GT(chosen.attention->backwards, 0);
    for (std::size_t u = 0; u < m.gradients.size(); ++u)
      for (std::size_t t = 0; t < m.gradients[u].size(); ++t) {
        if (plain.gradients[u][t].norm().item<double>() < 1e-9) continue;
        EXPECT_LT(relative_error(m.gradients[u][t], plain.gradients[u][t]), 1e-9) << m.spec().units[u].tensors[t].name;
      }
  }
}

// mistral has a window, qwen3 norms of q and k, llama and qwen2 shared keys, cohere2 both kinds of layers.
INSTANTIATE_TEST_SUITE_P(models, Kept, ::testing::Values("llama", "mistral", "qwen2", "qwen3", "cohere2", "gpt_neox"));

TEST(KeptAttention, leaves_to_torch_what_it_does_not_know) {
  const Tensor q = torch::zeros({2, 8, 4, 16}), k = torch::zeros({2, 8, 2, 16});
  const models::AttentionChoice choice{.by = std::make_shared<CpuFlash>()};
  EXPECT_NE(models::kept_attention(q, k, {.choice = choice}, 0), nullptr);
  EXPECT_EQ(models::kept_attention(q, k, {.choice = choice}, 0.1), nullptr) << "dropout";
  EXPECT_EQ(models::kept_attention(q, k, {.softcap = 3, .choice = choice}, 0), nullptr);
  EXPECT_EQ(models::kept_attention(q, k, {.sinks = torch::zeros({4}), .choice = choice}, 0), nullptr) << "autograd";
  EXPECT_EQ(models::kept_attention(q, k, {}, 0), nullptr) << "fp32 on the CPU";
  EXPECT_EQ(models::device_attention(q.to(torch::kBFloat16), k.to(torch::kBFloat16), {}, 0), nullptr);
}

// Of a kernel that knows no sinks: its result scaled, and its own backward called with the sink in the sum. Against
// torch's attention, in which autograd finds the gradients.
TEST(KeptAttention, counts_sinks_behind_a_kernel_that_knows_none) {
  torch::manual_seed(9);
  const std::vector<Document> documents = packed({{40}, {11, 1, 28}}).documents();
  for (const std::int64_t window : {0, 7})
    for (const bool cut : {false, true}) {
      SCOPED_TRACE(::testing::Message() << "window " << window << (cut ? ", documents" : ""));
      const auto leaf = [](at::IntArrayRef sizes) { return torch::randn(sizes, torch::kDouble).requires_grad_(); };
      const Tensor q = leaf({2, 40, 4, 16}), k = leaf({2, 40, 2, 16}), v = leaf({2, 40, 2, 16}), sinks = leaf({4}),
                   d_out = torch::randn({2, 40, 4, 16}, torch::kDouble);
      AttentionRules rules{.window = window, .sinks = sinks};
      if (cut) rules.documents = documents;
      const Tensor exact = models::attention(q, k, v, rules, 0);
      exact.backward(d_out);
      const torch::NoGradGuard no_grad;
      const auto inner = std::make_shared<CpuFlash>();
      rules.choice.by = inner;
      const auto by = models::kept_attention(q, k, rules, 0);
      ASSERT_NE(by, nullptr);
      EXPECT_EQ(by->name(), inner->name());
      const Tensor a = q.detach(), b = k.detach(), c = v.detach();
      const BlockAttention made = by->forward(a, b, c, rules);
      EXPECT_LT(relative_error(made.out, exact), 1e-10);
      const AttentionGradient d = by->backward(d_out, a, b, c, made, rules);
      EXPECT_LT(relative_error(d.q, q.grad()), 1e-10);
      EXPECT_LT(relative_error(d.k, k.grad()), 1e-10);
      EXPECT_LT(relative_error(d.v, v.grad()), 1e-10);
      EXPECT_LT(relative_error(d.sinks, sinks.grad()), 1e-10);
    }
}

TEST(FlashShape, heads_of_some_sizes_are_for_some_cards) {
  for (const int capability : {0, 80, 86, 89, 90, 100, 103, 120}) {
    for (const std::int64_t dim : {8, 128, 192, 232, 256})
      EXPECT_TRUE(models::flash_takes_heads_of(dim, capability)) << dim << " on " << capability;
    const bool large = capability == 80 || capability == 90 || capability == 100 || capability == 103;
    EXPECT_EQ(models::flash_takes_heads_of(200, capability), large) << capability;
    EXPECT_EQ(models::flash_takes_heads_of(224, capability), large) << capability;
    for (const std::int64_t dim : {100, 264}) EXPECT_FALSE(models::flash_takes_heads_of(dim, capability)) << dim;
  }
}

TEST(FlashShape, counts_windows_before_the_query_and_documents_by_their_ends) {
  const Tensor q = torch::zeros({2, 300, 4, 16});
  models::FlashShape shape = models::flash_shape(q, {});
  EXPECT_FALSE(shape.ends.defined());
  EXPECT_EQ(shape.longest, 300);
  EXPECT_EQ(shape.before, -1);
  EXPECT_EQ(models::flash_shape(q, {.window = 20}).before, 19) << "the query's own key is one of the window's";
  const std::vector<Document> documents = {{0, 0, 100}, {0, 100, 200}, {1, 0, 300}};
  shape = models::flash_shape(q, {.documents = documents});
  EXPECT_EQ(shape.longest, 300);
  EXPECT_TRUE(torch::equal(shape.ends, torch::tensor({0, 100, 300, 600}, torch::kInt)));
  const Tensor made = document_ends(documents);
  EXPECT_TRUE(models::flash_shape(q, {.documents = documents, .ends = made}).ends.is_same(made)) << "not once a layer";
}

}  // namespace
}  // namespace tierflow::testing

// Rows packed with documents, against the documents alone.
#include <ATen/Parallel.h>

#include <numeric>

#include "runtime/base/exception.h"
#include "runtime/models/attention.h"
#include "tests/runtime/expect.h"
#include "tests/runtime/models/fixture.h"

namespace tierflow::testing {
namespace {

using models::AttentionRules;
using torch::Tensor;

MicroBatch with_positions(const Tensor& positions) {
  return {
      .ids = torch::zeros({2, 4}, torch::kLong), .labels = torch::zeros({2, 4}, torch::kLong), .positions = positions};
}

TEST(Documents, are_what_positions_say) {
  const auto found = with_positions(torch::tensor({{0, 1, 0, 0}, {0, 1, 2, 3}}, torch::kLong)).documents();
  std::vector<std::array<std::int64_t, 3>> seen;
  for (const Document& d : found) seen.push_back({d.row, d.begin, d.length});
  EXPECT_EQ(seen, (std::vector<std::array<std::int64_t, 3>>{{0, 0, 2}, {0, 2, 1}, {0, 3, 1}, {1, 0, 4}}));
  EXPECT_TRUE(with_positions({}).documents().empty());
  EXPECT_TRUE(with_positions(torch::arange(4).expand({2, 4})).documents().empty());
}

TEST(Documents, wrong_positions_are_refused) {
  const auto expect = [](const Tensor& positions, const std::string& why) {
    expect_refusal(io::ErrorKind::usage, {why}, [&] { with_positions(positions).documents(); });
  };
  expect(torch::zeros({2, 4}, torch::kInt), "positions are int64, not Int");
  expect(torch::zeros({2, 3}, torch::kLong), "positions have the shape of ids");
  expect(torch::tensor({{0, 1, 2, 3}, {1, 2, 3, 4}}, torch::kLong), "position 1 of token 0 in row 1: a document's");
  expect(torch::tensor({{0, 1, 2, 3}, {4, 5, 6, 7}}, torch::kLong), "position 4 of token 0 in row 1: a document's");
  expect(torch::tensor({{0, 1, 0, 2}, {0, 1, 2, 3}}, torch::kLong), "position 2 of token 3 in row 0 comes after 0: a");
  expect(torch::tensor({{0, 1, -1, 0}, {0, 1, 2, 3}}, torch::kLong), "position -1 of token 2 in row 0 comes after 1");
}

struct Qkv {
  Tensor q, k, v, d_out;
  Qkv part(const Document& of) const {
    const auto cut = [&](const Tensor& x) { return x.narrow(0, of.row, 1).narrow(1, of.begin, of.length); };
    return {cut(q), cut(k), cut(v), cut(d_out)};
  }
};

// The result, and the gradients of q, k and v.
std::array<Tensor, 4> attend(const Qkv& of, const AttentionRules& rules) {
  const auto leaf = [](const Tensor& x) { return x.detach().clone().requires_grad_(); };
  const Tensor q = leaf(of.q), k = leaf(of.k), v = leaf(of.v);
  const Tensor out = models::attention(q, k, v, rules, 0.0);
  out.backward(of.d_out);
  return {out.detach(), q.grad(), k.grad(), v.grad()};
}

// Documents end inside, at the edge of, and beyond blocks of 64 queries and 128 keys; some are one token long.
TEST(Documents, attend_to_themselves_alone) {
  struct Shape {
    Lengths lengths;
    std::int64_t heads, kv_heads, dim, window;
  };
  torch::manual_seed(6);
  for (const Shape& s :
       {Shape{{{128, 64, 1, 107}, {300}, {37, 5, 257, 1}}, 4, 2, 64, 0},
        Shape{{{128, 64, 1, 107}, {37, 5, 257, 1}}, 2, 1, 16, 20}, Shape{{{1, 1, 1, 1}, {2, 2}}, 2, 2, 8, 0},
        Shape{{{63, 1, 64, 128, 128, 1}}, 3, 3, 80, 130}, Shape{{{256, 129}}, 2, 2, 128, 0}}) {
    const MicroBatch rows = packed(s.lengths);
    SCOPED_TRACE(::testing::Message() << rows.ids.sizes() << " window " << s.window);
    const auto draw = [&](std::int64_t heads) {
      return torch::randn({rows.ids.size(0), rows.ids.size(1), heads, s.dim}).to(torch::kBFloat16);
    };
    const Qkv all{draw(s.heads), draw(s.kv_heads), draw(s.kv_heads), draw(s.heads)};
    const Qkv exact{all.q.to(torch::kDouble), all.k.to(torch::kDouble), all.v.to(torch::kDouble),
                    all.d_out.to(torch::kDouble)};
    const AttentionRules rules{.window = s.window, .documents = rows.documents()};
    const auto got = attend(all, rules), got_exact = attend(exact, rules);
    const int threads = at::get_num_threads();
    at::set_num_threads(1);
    const auto on_one_thread = attend(all, rules);
    at::set_num_threads(threads);
    for (std::size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(torch::equal(got[i], on_one_thread[i]));
    for (const Document& document : rules.documents) {
      SCOPED_TRACE(::testing::Message() << "row " << document.row << " from " << document.begin << ": "
                                        << document.length);
      const auto alone = attend(all.part(document), {.window = s.window}),
                 alone_exact = attend(exact.part(document), {.window = s.window});
      const auto place = [&](const Tensor& x) {
        return x.narrow(0, document.row, 1).narrow(1, document.begin, document.length);
      };
      for (std::size_t i = 0; i < alone.size(); ++i) {
        SCOPED_TRACE(i);
        EXPECT_TRUE(torch::equal(place(got_exact[i]), alone_exact[i]));  // torch's, document by document
        if (document.begin % 128 == 0) {
          EXPECT_TRUE(torch::equal(place(got[i]), alone[i]));
        }
        // Of one token alone q and k have no gradient but for rounding.
        if (alone_exact[i].norm().item<double>() < 1e-9) {
          EXPECT_LT(place(got[i]).to(torch::kDouble).norm().item<double>(), 0.1 * std::sqrt(s.heads * s.dim));
        } else {
          EXPECT_LT(relative_error(place(got[i]), alone_exact[i]), 2e-2);
        }
      }
    }
  }
}

TEST(Documents, one_in_each_row_changes_no_bit) {
  torch::manual_seed(7);
  const auto draw = [](std::int64_t heads) { return torch::randn({2, 200, heads, 32}).to(torch::kBFloat16); };
  const Qkv all{draw(4), draw(2), draw(2), draw(4)};
  for (const std::int64_t window : {0, 30}) {
    const auto plain = attend(all, {.window = window});
    const auto said = attend(all, {.window = window, .documents = {{0, 0, 200}, {1, 0, 200}}});
    for (std::size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(torch::equal(plain[i], said[i]));
  }
}

std::vector<std::array<std::int64_t, 3>> places(const std::vector<Document>& documents) {
  std::vector<std::array<std::int64_t, 3>> all;
  for (const Document& each : documents) all.push_back({each.row, each.begin, each.length});
  return all;
}

TEST(Documents, are_cut_at_multiples_of_a_chunk_of_their_own_tokens) {
  using Places = std::vector<std::array<std::int64_t, 3>>;
  const std::vector<Document> given = {{0, 0, 2}, {0, 2, 7}, {1, 0, 9}};
  EXPECT_EQ(places(models::in_chunks(given, 2, 9, 3)),
            (Places{{0, 0, 2}, {0, 2, 3}, {0, 5, 3}, {0, 8, 1}, {1, 0, 3}, {1, 3, 3}, {1, 6, 3}}));
  EXPECT_EQ(places(models::in_chunks({}, 2, 5, 4)), (Places{{0, 0, 4}, {0, 4, 1}, {1, 0, 4}, {1, 4, 1}}));
  for (const std::int64_t chunk : {0, 9, 10}) {
    EXPECT_EQ(places(models::in_chunks(given, 2, 9, chunk)), places(given));
    EXPECT_TRUE(models::in_chunks({}, 2, 9, chunk).empty());
  }
}

class PackedModel : public EveryModel {};

void expect_the_documents_alone(const Case& which, torch::ScalarType type, const Tiling& tiling, double loss_error,
                                double gradient_error) {
  const MicroBatch rows = packed({{7, 1, 20, 12}, {40}, {16, 23, 1}});
  ResidentModel m = resident(which, type, 0.2, tiling);
  const double loss = m.forward_backward(rows, 0.5);
  const std::vector<std::vector<torch::Tensor>> gradients =
      std::exchange(m.gradients, ResidentModel(m.spec(), type).gradients);
  double alone = 0;
  for (const Document& document : rows.documents()) {
    const auto cut = [&](const Tensor& x) {
      return x.narrow(0, document.row, 1).narrow(1, document.begin, document.length).contiguous();
    };
    alone += m.forward_backward({.ids = cut(rows.ids), .labels = cut(rows.labels)}, 0.5);
  }
  EXPECT_NEAR(loss, alone, loss_error * alone);
  for (std::size_t u = 0; u < gradients.size(); ++u) {
    for (std::size_t t = 0; t < gradients[u].size(); ++t) {
      // Keys' biases move every score of a query alike: their gradient is rounding.
      if (m.spec().units[u].tensors[t].name.ends_with("k_proj.bias")) continue;
      EXPECT_LT(relative_error(gradients[u][t], m.gradients[u][t]), gradient_error)
          << m.spec().units[u].tensors[t].name;
    }
  }
}

TEST_P(PackedModel, is_that_of_the_documents_alone) {
  for (const Tiling& tiling : {Tiling{}, kTiled}) {
    expect_the_documents_alone(GetParam(), torch::kDouble, tiling, 1e-12, 1e-11);
    expect_the_documents_alone(GetParam(), torch::kBFloat16, tiling, 1e-4, 3e-2);
  }
}

TEST_P(PackedModel, counts_positions_by_itself_where_none_are_given) {
  ResidentModel m = resident(GetParam(), torch::kBFloat16);
  MicroBatch rows = batch(2, 40);
  const double loss = m.forward_backward(rows, 0.5);
  const std::vector<std::vector<torch::Tensor>> gradients =
      std::exchange(m.gradients, ResidentModel(m.spec(), torch::kBFloat16).gradients);
  rows.positions = torch::arange(40).expand({2, 40});
  EXPECT_EQ(loss, m.forward_backward(rows, 0.5));
  for (std::size_t u = 0; u < gradients.size(); ++u)
    for (std::size_t t = 0; t < gradients[u].size(); ++t)
      EXPECT_TRUE(torch::equal(gradients[u][t], m.gradients[u][t])) << m.spec().units[u].tensors[t].name;
}

INSTANTIATE_TEST_SUITE_P(models, PackedModel, ::testing::ValuesIn(cases()), case_name);

TEST(Documents, may_not_be_longer_than_the_models_positions_but_rows_may) {
  for (const char* learned : {"gpt2", "opt"}) {
    const ResidentModel m = resident(case_called(learned), torch::kBFloat16);
    const auto embed = [&](const Lengths& lengths) {
      return m.model->forward(0, m.bind(0, m.units), {}, m.model->share(packed(lengths), torch::kCPU), false);
    };
    EXPECT_EQ(embed({{64, 36}}).at(0).size(1), 100);
    expect_refusal(io::ErrorKind::usage, {"sequences of 65 tokens exceed the model's 64 positions"}, [&] {
      embed({{35, 65}});
    });
  }
}

}  // namespace
}  // namespace tierflow::testing

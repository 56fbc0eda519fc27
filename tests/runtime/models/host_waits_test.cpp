// What the host knows is looked at on the host, once, and nothing behind that waits for the device: on torch's device
// "meta", whose tensors have no values, .item(), nonzero() and copies to the host throw.
#include <ATen/ExpandUtils.h>
#include <torch/library.h>

#include "runtime/base/exception.h"
#include "runtime/models/embedding.h"
#include "runtime/models/ops.h"
#include "runtime/models/upload.h"
#include "tests/runtime/models/fixture.h"

namespace tierflow::testing {
namespace {

using torch::Tensor;

std::string refused(const MicroBatch& batch, std::int64_t vocabulary = 96) {
  try {
    check_tokens(batch, vocabulary, "micro-batch 3");
  } catch (const Exception& error) {
    EXPECT_EQ(error.error().kind, io::ErrorKind::usage);
    return error.error().detail;
  }
  return "";
}

TEST(CheckTokens, names_place_and_value) {
  const MicroBatch fine = batch(2, 7);
  EXPECT_EQ(refused(fine), "");
  const auto changed = [&](Tensor MicroBatch::*which, std::int64_t row, std::int64_t token, std::int64_t value) {
    MicroBatch changed = fine;
    changed.*which = (fine.*which).clone();
    (changed.*which).index_put_({row, token}, value);
    return refused(changed);
  };
  EXPECT_EQ(changed(&MicroBatch::ids, 1, 6, 96),
            "micro-batch 3: id 96 of token 6 in row 1 is beyond the vocabulary of 96");
  EXPECT_EQ(changed(&MicroBatch::ids, 0, 2, -1),
            "micro-batch 3: id -1 of token 2 in row 0 is beyond the vocabulary of 96");
  EXPECT_EQ(changed(&MicroBatch::ids, 0, 2, 95), "");
  EXPECT_EQ(changed(&MicroBatch::labels, 0, 5, 1000),
            "micro-batch 3: label 1000 of token 5 in row 0 is beyond the vocabulary of 96");
  EXPECT_EQ(changed(&MicroBatch::labels, 0, 5, -7), "") << "it does not count";
  MicroBatch taught = fine;
  taught.teacher_ids = torch::full({2, 7, 3}, 95, torch::kInt);
  EXPECT_EQ(refused(taught), "");
  taught.teacher_ids.index_put_({1, 4, 2}, 96);
  EXPECT_EQ(refused(taught), "micro-batch 3: the teacher's id 96 of token 4 in row 1 is beyond the vocabulary of 96");
  MicroBatch narrow = fine;
  narrow.ids = fine.ids.to(torch::kInt);
  EXPECT_EQ(refused(narrow), "micro-batch 3: ids are Long, not Int");
}

TEST(Upload, goes_through_one_block_and_changes_nothing) {
  const std::vector<Tensor> from = {torch::arange(5),
                                    Tensor(),
                                    torch::randn({3, 7}),
                                    torch::tensor({1, 2, 3}, torch::kInt),
                                    torch::randn({4, 6}).t(),
                                    torch::empty({0}, torch::kHalf),
                                    torch::randn({3}).to(torch::kHalf)};
  const std::vector<Tensor> there = models::upload_in_one_block(from, torch::kCPU, torch::TensorOptions());
  ASSERT_EQ(there.size(), from.size());
  std::set<const void*> blocks;
  for (std::size_t i = 0; i < from.size(); ++i) {
    ASSERT_EQ(there[i].defined(), from[i].defined());
    if (!from[i].defined()) continue;
    EXPECT_EQ(there[i].scalar_type(), from[i].scalar_type());
    EXPECT_TRUE(torch::equal(there[i], from[i])) << i;
    blocks.insert(there[i].storage().data());
    EXPECT_EQ(there[i].storage_offset() * there[i].element_size() % 16, 0);
  }
  EXPECT_EQ(blocks.size(), 1u);
  EXPECT_EQ(models::upload(from, torch::kCPU)[0].data_ptr(), from[0].data_ptr()) << "on the CPU it is there";
}

// Shapes of results that torch knows on meta in Python alone.
TORCH_LIBRARY_IMPL(aten, Meta, library) {
  library.impl("index_select", [](const Tensor& self, std::int64_t dim, const Tensor& index) {
    std::vector<std::int64_t> shape = self.sizes().vec();
    shape[static_cast<std::size_t>(dim < 0 ? dim + self.dim() : dim)] = index.numel();
    return torch::empty(shape, self.options());
  });
  library.impl("where.self", [](const Tensor& condition, const Tensor& self, const Tensor& other) {
    return torch::empty(at::infer_size(condition.sizes(), at::infer_size(self.sizes(), other.sizes())),
                        self.options().dtype(at::result_type(self, other)));
  });
  library.impl(
      "where.self_out", [](const Tensor& condition, const Tensor& self, const Tensor& other, Tensor& out) -> Tensor& {
        return out.resize_(at::infer_size(condition.sizes(), at::infer_size(self.sizes(), other.sizes()))), out;
      });
  library.impl("relu", [](const Tensor& self) { return torch::empty_like(self); });
  library.impl("abs.out", [](const Tensor& self, Tensor& out) -> Tensor& { return out.resize_(self.sizes()), out; });
  library.impl("native_layer_norm", [](const Tensor& input, c10::SymIntArrayRef, const std::optional<Tensor>&,
                                       const std::optional<Tensor>&, double) {
    std::vector<std::int64_t> rows = input.sizes().vec();
    rows.back() = 1;
    const auto wide = input.options().dtype(input.scalar_type() == torch::kDouble ? torch::kDouble : torch::kFloat);
    return std::tuple(torch::empty_like(input), torch::empty(rows, wide), torch::empty(rows, wide));
  });
  const auto of_two = [](const Tensor& self, const Tensor& other, Tensor& out) -> Tensor& {
    return out.resize_(at::infer_size(self.sizes(), other.sizes())), out;
  };
  library.impl("logical_and.out", of_two);
  library.impl("logical_not.out",
               [](const Tensor& self, Tensor& out) -> Tensor& { return out.resize_(self.sizes()), out; });
  library.impl("native_dropout", [](const Tensor& input, double, std::optional<bool>) {
    return std::tuple(torch::empty_like(input), torch::empty_like(input, torch::kBool));
  });
  library.impl("native_dropout_backward",
               [](const Tensor& d_out, const Tensor&, double) { return torch::empty_like(d_out); });
  library.impl("native_layer_norm_backward",
               [](const Tensor&, const Tensor& input, c10::SymIntArrayRef, const Tensor&, const Tensor&,
                  const std::optional<Tensor>& weight, const std::optional<Tensor>& bias, std::array<bool, 3>) {
                 const auto like = [](const std::optional<Tensor>& of) {
                   return of && of->defined() ? torch::empty_like(*of) : Tensor();
                 };
                 return std::tuple(torch::empty_like(input), like(weight), like(bias));
               });
}

Tensor on_meta(const Tensor& tensor) {
  return tensor.defined() ? tensor.to(torch::kMeta) : tensor;
}
std::vector<Tensor> on_meta(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> moved;
  for (const Tensor& tensor : tensors) moved.push_back(on_meta(tensor));
  return moved;
}

// A step's forward and backward of one micro-batch.
void run_on_meta(const ResidentModel& m, const MicroBatch& tokens, const std::optional<Distillation>& rule) {
  const torch::NoGradGuard no_grad;
  Shared shared = m.model->share(tokens, torch::kMeta);
  if (rule)
    shared.teacher = models::SoftTargets(on_meta(tokens.teacher_ids), on_meta(tokens.teacher_log_probabilities), *rule);
  std::vector<Carry> inputs = {{}};
  const auto weights = [&](int stage) { return on_meta(m.bind(stage, m.units)); };
  const auto sums = [&](int stage) { return Gradients(on_meta(m.bind(stage, m.gradients))); };
  for (int stage = 0; stage + 1 < m.stages(); ++stage)
    inputs.push_back(m.model->forward(stage, weights(stage), inputs.back(), shared, true));
  const int last = m.stages() - 1;
  const HeadResult head = m.model->head_loss_and_backward(weights(last), sums(last), inputs.back(), shared, 0.5);
  EXPECT_TRUE(head.loss_sum.is_meta());
  EXPECT_EQ(head.loss_sum.scalar_type(), torch::kDouble);
  Carry d = head.d_carry;
  for (int stage = last - 1; stage >= 0; --stage) {
    const auto at = static_cast<std::size_t>(stage);
    d = m.model->backward(stage, weights(stage), sums(stage), taken_by_backward(m.spec().stages[at], inputs[at]),
                          shared, d);
  }
}

class NoWait : public EveryModel {};

TEST_P(NoWait, of_a_step_until_the_losses_are_read) {
  for (const Tiling& tiling : {Tiling{}, kTiled}) {
    const ResidentModel m = resident(GetParam(), torch::kBFloat16, 0.2, tiling);
    EXPECT_NO_THROW(run_on_meta(m, batch(2, 16), std::nullopt));
    EXPECT_NO_THROW(run_on_meta(m, packed({{10, 6}, {16}}), std::nullopt));
  }
}

// Those without experts: how many tokens an expert has, the host must know.
std::vector<Case> dense_cases() {
  std::vector<Case> dense;
  for (Case& one : cases())
    if (parse_model_spec(one.json, one.name).config.experts.count == 0) dense.push_back(std::move(one));
  return dense;
}
INSTANTIATE_TEST_SUITE_P(models, NoWait, ::testing::ValuesIn(dense_cases()), case_name);

TEST(NoWait, of_a_teacher) {
  MicroBatch tokens = batch(2, 16);
  tokens.teacher_ids = torch::arange(4, torch::kInt).expand({2, 16, 4});
  tokens.teacher_log_probabilities = torch::zeros({2, 16, 4}, torch::kHalf);
  for (const Tiling& tiling : {Tiling{}, kTiled})
    for (const double temperature : {1.0, 2.0}) {
      const ResidentModel m = resident(cases()[0], torch::kBFloat16, 0.2, tiling);
      EXPECT_NO_THROW(run_on_meta(m, tokens, Distillation{.top = 4, .alpha = 0.5, .temperature = temperature}));
    }
}

// The tokens of a tile are added as if they had been counted, and the others nowhere.
TEST(TiledEmbedding, adds_the_rows_of_its_tile_alone) {
  torch::manual_seed(4);
  const std::int64_t rows = 5, first = 5;
  for (const auto type : {torch::kDouble, torch::kBFloat16}) {
    const Tensor ids = torch::randint(15, {40}, torch::kLong) - first, d = torch::randn({40, 8}).to(type);
    const Tensor sum = torch::ones({rows, 8}, type == torch::kDouble ? type : torch::kFloat), expected = sum.clone();
    const Tensor here = ids.ge(0).logical_and(ids.lt(rows)).nonzero().squeeze(1);
    models::add_rows_at(expected, ids.index_select(0, here), d.index_select(0, here));
    models::add_rows_within(sum, ids, d);
    EXPECT_TRUE(torch::equal(sum, expected));
  }
  models::add_rows_within(Tensor(), torch::zeros({1}, torch::kLong), torch::zeros({1, 8}));
}

}  // namespace
}  // namespace tierflow::testing

// Low-rank adapters: the model is that of merged weights, and the gradients of A and B follow from those of the merged
// weight; the base has none.
#include "runtime/spec/adapters.h"

#include "runtime/models/dense_weights.h"
#include "tests/runtime/models/fixture.h"

namespace tierflow::testing {
namespace {

ModelSpec adapted(const Case& which, const AdapterConfig& config = {.rank = 3, .alpha = 6}, const Tiling& tiling = {}) {
  ModelSpec spec = parse_model_spec(which.json, which.name, tiling);
  add_adapters(spec, config);
  return spec;
}

// The tensor of that name; of its adapter.
struct Found {
  std::size_t unit = 0, tensor = 0;
};
Found find(const ModelSpec& spec, const std::string& name) {
  for (std::size_t u = 0; u < spec.units.size(); ++u)
    for (std::size_t t = 0; t < spec.units[u].tensors.size(); ++t)
      if (spec.units[u].tensors[t].name == name) return {u, t};
  ADD_FAILURE() << "no tensor " << name;
  return {};
}

// The base model with each adapter merged: W + scale B A, less that of its first values, with rows of the magnitude's
// length; transposed where weights are [in, out].
ResidentModel merged(const Case& which, const ResidentModel& from, const Tiling& tiling) {
  ResidentModel base(parse_model_spec(which.json, which.name, tiling), torch::kDouble);
  const bool transposed = has_transposed_weights(base.spec());
  for (std::size_t u = 0; u < base.units.size(); ++u)
    for (std::size_t t = 0; t < base.units[u].size(); ++t) base.units[u][t] = from.units[u][t].clone();
  double scale = 1;
  for (std::size_t u = 0; u < base.units.size(); ++u)
    for (std::size_t t = base.units[u].size(); t < from.units[u].size(); ++t) {
      const TensorSpec& tensor = from.spec().units[u].tensors[t];
      const Found found = find(base.spec(), linear_module(tensor) + ".weight");
      torch::Tensor weight = base.units[found.unit][found.tensor];
      if (transposed) weight = weight.t();
      const AdapterPart part = adapter_part(tensor);
      if (part == AdapterPart::b || part == AdapterPart::initial_b) {
        scale = part == AdapterPart::b ? tensor.scale : -scale;
        weight += scale * torch::mm(from.units[u][t], from.units[u][t - 1]);
      } else if (part == AdapterPart::initial_magnitude) {
        weight *= ((from.units[u][t] + from.units[u][t - 1]) / weight.norm(2, {1})).unsqueeze(1);
      }
    }
  return base;
}

class Adapters : public EveryModel {};

TEST_P(Adapters, AreTheModelOfMergedWeights) {
  const AdapterConfig plain{.rank = 3, .alpha = 6}, first{.rank = 3, .alpha = 6, .init = AdapterInit::pissa},
      dora{.rank = 3, .alpha = 6, .dora = true};
  for (const auto& [tiling, config] :
       {std::pair{Tiling{}, plain}, {kTiled, plain}, {Tiling{}, first}, {kTiled, dora}}) {
    const ModelSpec spec = adapted(GetParam(), config, tiling);
    ResidentModel model = adapted_model(spec, torch::kDouble);
    for (std::size_t u = 0; u < model.units.size(); ++u)
      for (std::size_t t = 0; t < model.units[u].size(); ++t)
        if (adapter_part(spec.units[u].tensors[t]) == AdapterPart::initial_magnitude) model.units[u][t] += 1;
    ResidentModel whole = merged(GetParam(), model, tiling);
    const bool transposed = has_transposed_weights(spec);
    const MicroBatch tokens = batch(2, 24);
    const double loss = model.forward_backward(tokens, 0.25), expected = whole.forward_backward(tokens, 0.25);
    EXPECT_NEAR(loss, expected, 1e-10 * expected);
    int adapters = 0;
    for (std::size_t u = 0; u < whole.units.size(); ++u)
      for (std::size_t t = whole.units[u].size(); t < model.units[u].size(); ++t) {
        const TensorSpec& b = spec.units[u].tensors[t];
        if (adapter_part(b) != AdapterPart::b) continue;
        ASSERT_EQ(b.scale, 2.0);
        const Found weight = find(whole.spec(), linear_module(b) + ".weight");
        torch::Tensor d_weight = whole.gradients[weight.unit][weight.tensor];
        torch::Tensor now = whole.units[weight.unit][weight.tensor];
        if (transposed) d_weight = d_weight.t(), now = now.t();
        if (config.dora) {
          // The lengths of the rows are constants: of a gain and a sum, each has the other's part.
          const torch::Tensor magnitude = model.units[u][t + 1] + model.units[u][t + 2];
          EXPECT_LT(relative_error(model.gradients[u][t + 1], (d_weight * now).sum(1) / magnitude), 1e-9) << b.name;
          torch::Tensor sum = model.units[weight.unit][weight.tensor];
          sum = (transposed ? sum.t() : sum) + 2.0 * torch::mm(model.units[u][t], model.units[u][t - 1]);
          d_weight = d_weight * (magnitude / sum.norm(2, {1})).unsqueeze(1);
        }
        EXPECT_LT(relative_error(model.gradients[u][t - 1], 2.0 * torch::mm(model.units[u][t].t(), d_weight)), 1e-9)
            << b.name;
        EXPECT_LT(relative_error(model.gradients[u][t], 2.0 * torch::mm(d_weight, model.units[u][t - 1].t())), 1e-9)
            << b.name;
        ++adapters;
      }
    int layers = 0;
    for (const UnitSpec& unit : whole.spec().units)
      for (const TensorSpec& tensor : unit.tensors)
        layers += unit.name.starts_with("layers.") && !linear_module(tensor).empty() ? 1 : 0;
    EXPECT_EQ(adapters, layers);
  }
}

TEST_P(Adapters, BeginAsTheBaseModel) {
  ResidentModel model = adapted_model(adapted(GetParam()), torch::kDouble);
  for (std::size_t u = 0; u < model.units.size(); ++u)
    for (std::size_t t = 0; t < model.units[u].size(); ++t)
      if (model.spec().units[u].tensors[t].name.ends_with("lora_B.weight")) model.units[u][t].zero_();
  ResidentModel base = merged(GetParam(), model, {});
  const MicroBatch tokens = batch(2, 24);
  EXPECT_EQ(model.forward_backward(tokens, 1.0), base.forward_backward(tokens, 1.0));
}

// Whatever the first values are, until they change: in bf16 too.
TEST_P(Adapters, BeginAsTheBaseModelWithTheirFirstValues) {
  const MicroBatch tokens = batch(2, 24);
  for (const auto type : {torch::kDouble, torch::kBFloat16}) {
    ResidentModel model = adapted_model(adapted(GetParam(), {.rank = 3, .alpha = 6, .init = AdapterInit::olora}), type);
    ResidentModel base(parse_model_spec(GetParam().json, GetParam().name), type);
    for (std::size_t u = 0; u < model.units.size(); ++u)
      for (std::size_t t = 0; t < model.units[u].size(); ++t) {
        const AdapterPart part = adapter_part(model.spec().units[u].tensors[t]);
        if (part == AdapterPart::none) base.units[u][t] = model.units[u][t].clone();
        if (part == AdapterPart::initial_a || part == AdapterPart::initial_b)
          model.units[u][t].copy_(model.units[u][t - 2]);
      }
    EXPECT_EQ(model.forward_backward(tokens, 1.0), base.forward_backward(tokens, 1.0));
  }
}

// What is kept changes no bit, in bf16.
void expect_kept_bits(ResidentModel model) {
  if (!model.model->can_keep(1)) GTEST_SKIP() << "this model keeps nothing";
  const Shared shared = model.model->share(batch(2, 40), torch::kCPU);
  const std::vector<Carry> inputs = model.forward(shared, true);
  const Carry d_out = {torch::randn_like(inputs[2][0])};
  const auto run = [&](bool keep) {
    for (auto& gradient : model.gradients[1])
      if (gradient.defined()) gradient.zero_();
    Carry carry = inputs[1];
    const torch::NoGradGuard no_grad;
    std::unique_ptr<KeptActivations> kept;
    if (keep) {
      kept = model.model->forward_keeping(1, model.bind(1, model.units), carry, shared);
      EXPECT_TRUE(torch::equal(carry[0], inputs[2][0]));
    }
    const Carry d = keep ? model.model->backward_kept(1, model.bind(1, model.units), model.bind(1, model.gradients),
                                                      inputs[1], shared, d_out, std::move(kept))
                         : model.model->backward(1, model.bind(1, model.units), model.bind(1, model.gradients),
                                                 inputs[1], shared, d_out);
    std::vector<torch::Tensor> all{d[0].clone()};
    for (const auto& gradient : model.gradients[1])
      if (gradient.defined()) all.push_back(gradient.clone());
    return all;
  };
  const auto plain = run(false), kept = run(true);
  ASSERT_EQ(plain.size(), kept.size());
  for (std::size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(torch::equal(plain[i], kept[i])) << i;
}
TEST_P(Adapters, KeptActivationsHaveTheSameBits) {
  expect_kept_bits(adapted_model(adapted(GetParam()), torch::kBFloat16));
  expect_kept_bits(adapted_model(adapted(GetParam(), {.rank = 3, .alpha = 6, .dora = true}), torch::kBFloat16));
}

// A visit's lengths of rows are computed once and then used: with them, every bit is the same; with others, it is not.
TEST_P(Adapters, LengthsOfRowsAreThoseOfTheVisit) {
  const ModelSpec spec = adapted(GetParam(), {.rank = 3, .alpha = 6, .dora = true});
  ResidentModel model = adapted_model(spec, torch::kBFloat16);
  for (std::size_t u = 0; u < model.units.size(); ++u)
    for (std::size_t t = 0; t < model.units[u].size(); ++t)
      if (spec.units[u].tensors[t].format == WeightFormat::fp32)
        model.units[u][t] = (model.units[u][t].to(torch::kFloat) + 1).contiguous();
  const Shared shared = model.model->share(batch(2, 24), torch::kCPU);
  const std::vector<Carry> inputs = model.forward(shared, true);
  const Weights plain = model.bind(1, model.units);
  Weights stored = plain;
  const TensorSpec* first = spec.units[spec.stages[1].units.front()].tensors.data();
  for (std::size_t i = 0; i < stored.size(); ++i)
    if (first[i].format == WeightFormat::fp32) stored[i] = plain[i].view(torch::kByte).view({-1});
  Weights dense = models::dense_weights(spec, 1, stored);
  const auto out_of = [&](const Weights& weights) {
    return model.model->forward(1, weights, inputs[1], shared, true)[0];
  };
  EXPECT_TRUE(torch::equal(out_of(dense), inputs[2][0]));
  int lengths = 0;
  for (std::size_t i = 0; i < dense.size(); ++i)
    if (adapter_part(first[i]) == AdapterPart::initial_magnitude) {
      ASSERT_EQ(dense[i].dim(), 2);
      dense[i].select(0, 1).mul_(2);
      ++lengths;
    }
  EXPECT_GT(lengths, 0);
  EXPECT_FALSE(torch::equal(out_of(dense), inputs[2][0]));
}

// Dropout of the adapters' input: the same masks in the forward and in what is computed again, none in evaluation.
TEST_P(Adapters, DropoutIsThatOfTheSeed) {
  for (const bool dora : {false, true}) {
    const ModelSpec spec = adapted(GetParam(), {.rank = 3, .alpha = 6, .dropout = 0.5, .dora = dora});
    ResidentModel model = adapted_model(spec, torch::kDouble);
    EXPECT_EQ(model.model->draws(), models::Draws::own);
    const MicroBatch tokens = batch(2, 24);
    const double once = model.forward_backward(tokens, 1.0, true, 40),
                 again = model.forward_backward(tokens, 1.0, true, 40);
    EXPECT_EQ(once, again);
    EXPECT_NE(once, model.forward_backward(tokens, 1.0, true, 41));
    if (dora) continue;  // its gradient takes lengths for constants
    // The gradient is that of the masks that were drawn: a small step against it lowers this very loss.
    model.zero_gradients();
    model.forward_backward(tokens, 1.0, true, 40);
    double expected = 0;
    for (std::size_t u = 0; u < model.units.size(); ++u)
      for (std::size_t t = 0; t < model.units[u].size(); ++t)
        if (model.gradients[u][t].defined()) {
          expected += 1e-7 * model.gradients[u][t].square().sum().item<double>();
          model.units[u][t] -= 1e-7 * model.gradients[u][t];
        }
    const double lower = model.forward_backward(tokens, 1.0, true, 40);
    EXPECT_NEAR((once - lower) / expected, 1.0, 0.01);
  }
}
INSTANTIATE_TEST_SUITE_P(models, Adapters, ::testing::ValuesIn(cases()), case_name);

}  // namespace
}  // namespace tierflow::testing

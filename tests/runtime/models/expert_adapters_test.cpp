// Adapters of experts: the model is that of merged experts, the gradients of A and B follow from those of the merged
// matrices, an expert without tokens gives its adapter none, and what is kept changes no bit.
#include "runtime/device/device_memory.h"
#include "runtime/spec/adapters.h"
#include "runtime/spec/expert_parameters.h"
#include "tests/runtime/models/fixture.h"

namespace tierflow::testing {
namespace {

const AdapterConfig kBoth{.rank = 3, .alpha = 6, .parameters = {"gate_up_proj", "down_proj"}};
// The MLP in stages of two experts.
constexpr Tiling kSome{.block_elements = 1, .experts = 2};

ModelSpec adapted(const Case& which, const AdapterConfig& config = kBoth, const Tiling& tiling = {}) {
  ModelSpec spec = parse_model_spec(which.json, which.name, tiling);
  add_adapters(spec, config);
  return spec;
}

// The factors of a unit beside a part of a parameter, or their gradients.
struct Factors {
  torch::Tensor a, b;  // of its experts; b with the rows of that part
};
Factors factors(const UnitSpec& unit, const std::vector<torch::Tensor>& tensors, const ExpertPart& part) {
  Factors found;
  for (std::size_t t = 0; t < unit.tensors.size(); ++t) {
    const TensorSpec& tensor = unit.tensors[t];
    if (!is_expert_adapter(tensor) || linear_module(tensor) != part.parameter) continue;
    const torch::Tensor some = tensors[t].narrow(0, part.expert - tensor.first_row, part.experts);
    if (adapter_part(tensor) == AdapterPart::a) found.a = some;
    if (adapter_part(tensor) == AdapterPart::b) found.b = some.narrow(1, part.row, part.rows);
  }
  return found;
}

// [experts, out, in].
torch::Tensor matrices(const ModelSpec& spec, const torch::Tensor& tensor) {
  if (tensor.dim() == 2) return tensor.unsqueeze(0);
  return spec.config.experts.transposed ? tensor.transpose(1, 2) : tensor;
}

// Uses each tensor of `model`'s base that has matrices of experts.
void each_part(const ModelSpec& spec,
               const std::function<void(std::size_t unit, std::size_t tensor, const ExpertPart& part)>& use) {
  for (std::size_t u = 0; u < spec.units.size(); ++u)
    for (std::size_t t = 0; t < spec.units[u].tensors.size(); ++t) {
      const TensorSpec& tensor = spec.units[u].tensors[t];
      if (is_adapter(tensor)) continue;
      if (const auto part = expert_part(spec.config, tensor)) use(u, t, *part);
    }
}

// The base with merged experts.
ResidentModel merged(const Case& which, const ResidentModel& from, const Tiling& tiling) {
  ResidentModel base(parse_model_spec(which.json, which.name, tiling), torch::kDouble);
  for (std::size_t u = 0; u < base.units.size(); ++u)
    for (std::size_t t = 0; t < base.units[u].size(); ++t) base.units[u][t] = from.units[u][t].clone();
  each_part(base.spec(), [&](std::size_t u, std::size_t t, const ExpertPart& part) {
    const Factors of = factors(from.spec().units[u], from.units[u], part);
    if (of.a.defined()) matrices(base.spec(), base.units[u][t]) += 2.0 * torch::bmm(of.b, of.a);
  });
  return base;
}

class ExpertAdapters : public EveryModel {};

TEST_P(ExpertAdapters, AreTheModelOfMergedExperts) {
  const AdapterConfig down{.rank = 3, .alpha = 6, .parameters = {"experts.down_proj"}, .parameters_alone = true};
  AdapterConfig alone = kBoth;
  alone.parameters_alone = true;
  for (const auto& [tiling, config] : {std::pair{Tiling{}, alone}, {kTiled, alone}, {kSome, alone}, {kSome, down}}) {
    const ModelSpec spec = adapted(GetParam(), config, tiling);
    ResidentModel model = adapted_model(spec, torch::kDouble);
    ResidentModel whole = merged(GetParam(), model, tiling);
    const MicroBatch tokens = batch(2, 24);
    const double loss = model.forward_backward(tokens, 0.25), expected = whole.forward_backward(tokens, 0.25);
    EXPECT_NEAR(loss, expected, 1e-10 * expected);
    int parts = 0;
    std::vector<std::vector<torch::Tensor>> d_a = model.units;  // summed over gate and up
    for (auto& unit : d_a)
      for (auto& tensor : unit) tensor = torch::zeros_like(tensor);
    each_part(whole.spec(), [&](std::size_t u, std::size_t t, const ExpertPart& part) {
      const Factors of = factors(spec.units[u], model.units[u], part);
      if (!of.a.defined()) return;
      const torch::Tensor d = matrices(spec, whole.gradients[u][t]);
      const Factors found = factors(spec.units[u], model.gradients[u], part);
      EXPECT_LT(relative_error(found.b, 2.0 * torch::bmm(d, of.a.transpose(1, 2))), 1e-9) << part.parameter;
      factors(spec.units[u], d_a[u], part).a += 2.0 * torch::bmm(of.b.transpose(1, 2), d);
      ++parts;
    });
    for (std::size_t u = 0; u < spec.units.size(); ++u)
      for (std::size_t t = 0; t < spec.units[u].tensors.size(); ++t)
        if (adapter_part(spec.units[u].tensors[t]) == AdapterPart::a) {
          EXPECT_LT(relative_error(model.gradients[u][t], d_a[u][t]), 1e-9) << spec.units[u].tensors[t].name;
        }
    EXPECT_GT(parts, 0);
  }
}

// Beside adapters of linear layers, and B zero: the base, to the bit.
TEST_P(ExpertAdapters, BeginAsTheBaseModel) {
  const ModelSpec spec = adapted(GetParam());
  for (const auto type : {torch::kDouble, torch::kBFloat16}) {
    ResidentModel model = adapted_model(spec, type), base(parse_model_spec(GetParam().json, GetParam().name), type);
    for (std::size_t u = 0; u < model.units.size(); ++u)
      for (std::size_t t = 0; t < model.units[u].size(); ++t) {
        if (!is_adapter(spec.units[u].tensors[t])) base.units[u][t] = model.units[u][t].clone();
        if (adapter_part(spec.units[u].tensors[t]) == AdapterPart::b) model.units[u][t].zero_();
      }
    EXPECT_EQ(model.forward_backward(batch(2, 24), 1.0), base.forward_backward(batch(2, 24), 1.0));
  }
}

// In bf16.
TEST_P(ExpertAdapters, KeptActivationsHaveTheSameBits) {
  ResidentModel model = adapted_model(adapted(GetParam()), torch::kBFloat16);
  ASSERT_TRUE(model.model->can_keep(1));
  const Shared shared = model.model->share(batch(2, 40), torch::kCPU);
  const std::vector<Carry> inputs = model.forward(shared, true);
  const Carry d_out = {torch::randn_like(inputs[2][0])};
  const auto run = [&](bool keep) {
    model.zero_gradients();
    Carry carry = inputs[1];
    const torch::NoGradGuard no_grad;
    std::unique_ptr<KeptActivations> kept;
    if (keep) {
      kept = model.model->forward_keeping(1, model.bind(1, model.units), carry, shared);
      EXPECT_TRUE(torch::equal(carry[0], inputs[2][0]));
    }
    const auto weights = model.bind(1, model.units), gradients = model.bind(1, model.gradients);
    const Carry d = keep ? model.model->backward_kept(1, weights, gradients, inputs[1], shared, d_out, std::move(kept))
                         : model.model->backward(1, weights, gradients, inputs[1], shared, d_out);
    std::vector<torch::Tensor> all{d[0].clone()};
    for (const auto& gradient : gradients)
      if (gradient.defined()) all.push_back(gradient.clone());
    return all;
  };
  const auto plain = run(false), kept = run(true);
  ASSERT_EQ(plain.size(), kept.size());
  for (std::size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(torch::equal(plain[i], kept[i])) << i;
}

// A token takes few experts: the others' factors get no gradient, those it takes do.
TEST_P(ExpertAdapters, AnExpertWithoutTokensGetsNoGradient) {
  for (const Tiling& tiling : {Tiling{}, kSome}) {
    const ModelSpec spec = adapted(GetParam(), kBoth, tiling);
    ResidentModel model = adapted_model(spec, torch::kDouble);
    model.forward_backward(batch(1, 1), 1.0);
    int with = 0, without = 0;
    for (std::size_t u = 0; u < spec.units.size(); ++u)
      for (std::size_t t = 0; t < spec.units[u].tensors.size(); ++t) {
        if (!is_expert_adapter(spec.units[u].tensors[t])) continue;
        const torch::Tensor sizes = model.gradients[u][t].abs().sum({1, 2});
        with += static_cast<int>((sizes > 0).sum().item<std::int64_t>());
        without += static_cast<int>((sizes == 0).sum().item<std::int64_t>());
      }
    // Each layer's factors are four tensors.
    const int layers = 2, taken = static_cast<int>(spec.config.experts.per_token);
    EXPECT_EQ(with, layers * 4 * taken);
    EXPECT_EQ(without, layers * 4 * (static_cast<int>(spec.config.experts.count) - taken));
  }
}

// Rows of one or two tokens apart, where most experts have none, or together.
TEST_P(ExpertAdapters, GradientsOfMicroBatchesAddUp) {
  for (const std::int64_t length : {1, 2}) {
    const ModelSpec spec = adapted(GetParam(), kBoth, kSome);
    ResidentModel together = adapted_model(spec, torch::kDouble), apart = adapted_model(spec, torch::kDouble);
    const MicroBatch rows = batch(2, length);
    together.forward_backward(rows, 0.5);
    for (int row = 0; row < 2; ++row)
      apart.forward_backward(
          {.ids = rows.ids.narrow(0, row, 1).clone(), .labels = rows.labels.narrow(0, row, 1).clone()}, 0.5);
    for (std::size_t u = 0; u < spec.units.size(); ++u)
      for (std::size_t t = 0; t < spec.units[u].tensors.size(); ++t)
        if (is_adapter(spec.units[u].tensors[t])) {
          const std::string& name = spec.units[u].tensors[t].name;
          const bool scores = name.find("q_proj") != std::string::npos || name.find("k_proj") != std::string::npos;
          // Without sinks a token alone attends to itself whatever its score: gradients of scores are zero but for
          // rounding.
          if (length == 1 && scores && spec.config.names.sinks.empty())
            EXPECT_LT(
                std::max(apart.gradients[u][t].norm().item<double>(), together.gradients[u][t].norm().item<double>()),
                1e-12)
                << name;
          else
            EXPECT_LT(relative_error(apart.gradients[u][t], together.gradients[u][t]), 1e-10) << name;
        }
  }
}

TEST_P(ExpertAdapters, NoneIsLeftOut) {
  ModelSpec spec = adapted(GetParam());
  for (TensorSpec& tensor : spec.units[2].tensors)
    if (is_expert_adapter(tensor)) tensor.name.insert(tensor.name.rfind(".lora_"), ".elsewhere");
  EXPECT_THROW(make_model(spec), std::logic_error);
}

// Equal tokens take the same experts, all of them: no more is needed than where they take many, as what is needed at
// most is set aside before any routing.
TEST_P(ExpertAdapters, NeedNoMoreMemoryForTokensOfTheSameExperts) {
  DeviceMemory& memory = DeviceMemory::install();
  AdapterConfig wide = kBoth;
  wide.rank = 128;
  ResidentModel model = adapted_model(adapted(GetParam(), wide, kSome), torch::kBFloat16);
  const MicroBatch varied = batch(2, 64);
  MicroBatch equal = batch(2, 64);
  equal.ids.fill_(7);
  const auto most = [&](const MicroBatch& tokens) {
    memory.release_kept();
    memory.reset_peak();
    const std::uint64_t before = memory.stats().used;
    model.forward_backward(tokens, 1.0);
    return memory.stats().peak_used - before;
  };
  most(varied);
  EXPECT_LE(most(equal), most(varied));
}

INSTANTIATE_TEST_SUITE_P(models, ExpertAdapters,
                         ::testing::Values(case_called("mixtral"), case_called("qwen2_moe"), case_called("granite_moe"),
                                           case_called("glm4_moe"), case_called("gpt_oss")),
                         case_name);

}  // namespace
}  // namespace tierflow::testing

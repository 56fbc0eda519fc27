// fp32-master+adam32 against the plain loop: fp32 masters, weights cast by the hi rule, fp32 sums of micro-batch
// gradients rounded to bf16, the norm over those, AdamW. Bit for bit with the same optimizer arithmetic, and within
// rounding of torch.optim.AdamW.
#include <gtest/gtest.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/utils.h>

#include <cmath>
#include <cstring>

#include "runtime/base/exception.h"
#include "runtime/checkpoint/init.h"
#include "runtime/device/device_memory.h"
#include "runtime/session/layers.h"
#include "tests/runtime/models/fixture.h"

namespace tierflow::testing {
namespace {

constexpr std::uint64_t kMiB = 1 << 20;
constexpr double kLr = 2e-3, kDecay = 0.1, kClip = 0.05;
constexpr int kSteps = 5;

struct Parameter {
  torch::Tensor master, m, v;  // fp32
  bool decays = true;
};

torch::Tensor hi_of(const torch::Tensor& master) {
  torch::Tensor words = torch::empty_like(master, torch::kBFloat16);
  for (std::int64_t i = 0; i < master.numel(); ++i) {
    const std::uint16_t bits = optim::bf16_from_float(master.data_ptr<float>()[i]);
    std::memcpy(static_cast<char*>(words.data_ptr()) + 2 * i, &bits, 2);
  }
  return words;
}

// One update of all parameters from fp32 gradient sums, by optim's arithmetic.
void update(std::vector<Parameter>& parameters, const std::vector<torch::Tensor>& sums, int step) {
  double squares = 0;
  std::vector<torch::Tensor> rounded;
  for (const torch::Tensor& sum : sums) {
    rounded.push_back(sum.to(torch::kBFloat16).contiguous());
    std::vector<double> segments((sum.numel() + optim::kNormSegment - 1) / optim::kNormSegment);
    optim::gradient_norm_squared(static_cast<const std::uint16_t*>(rounded.back().data_ptr()), sum.numel(),
                                 segments.data());
    for (const double segment : segments) squares += segment;
  }
  const double scale = std::min(1.0, kClip / (std::sqrt(squares) + 1e-6));
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    Parameter& parameter = parameters[i];
    const auto n = static_cast<std::size_t>(parameter.master.numel());
    auto hi = torch::empty({parameter.master.numel()}, torch::kInt16), lo = torch::empty_like(hi);
    const auto words = [](torch::Tensor& tensor) { return static_cast<std::uint16_t*>(tensor.data_ptr()); };
    optim::split_master(parameter.master.data_ptr<float>(), words(hi), words(lo), n);
    const optim::State state{.hi = words(hi),
                             .lo = words(lo),
                             .m = {optim::MomentFormat::f32, parameter.m.data_ptr()},
                             .v = {optim::MomentFormat::f32, parameter.v.data_ptr()}};
    optim::adamw_update({.lr = static_cast<float>(kLr),
                         .weight_decay = parameter.decays ? static_cast<float>(kDecay) : 0.0F,
                         .step = step,
                         .gradient_scale = static_cast<float>(scale)},
                        static_cast<const std::uint16_t*>(rounded[i].data_ptr()), state, n);
    optim::join_master(words(hi), words(lo), parameter.master.data_ptr<float>(), n);
  }
}

SessionOptions options() {
  return {.device_memory = 64 * kMiB,
          .host_memory = 64 * kMiB,
          .precision = Precision::fp32_master_adam32,
          .clip = kClip,
          .micro_batch = 2,
          .micro_batches = 2,
          .sequence_length = 16};
}

MicroBatch some_batch(int step, int index) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(100 * step + index);
  const auto tokens = torch::randint(96, {2, 17}, generator, torch::kLong);
  return {.ids = tokens.narrow(1, 0, 16).contiguous(), .labels = tokens.narrow(1, 1, 16).contiguous()};
}

// Carries of the two micro-batches as the stage takes them: one after the other, or their rows as one.
std::vector<Carry> as_taken(const StageSpec& stage, const std::vector<Carry>& carries) {
  if (stage.together == (carries.size() == 1)) return carries;
  if (stage.together) return {{torch::cat({carries[0][0].flatten(0, 1), carries[1][0].flatten(0, 1)})}};
  const auto halves = carries[0][0].chunk(2);
  return {{halves[0].reshape({2, 16, -1})}, {halves[1].reshape({2, 16, -1})}};
}

class PlainLoop : public ::testing::TestWithParam<Case> {};

TEST_P(PlainLoop, SameBits) {
  DeviceMemory::install();
  const ModelSpec spec = parse_model_spec(GetParam().json, GetParam().name);
  const WeightSource weights = [](const TensorSpec& tensor, std::uint64_t first, std::span<float> out) {
    initial_values(tensor, 5, first, out);
    if (tensor.init == Init::normal)
      for (float& value : out) value *= 6;
  };
  Session session({make_model(spec), weights}, options(), {.lr = kLr, .weight_decay = kDecay});

  const torch::NoGradGuard no_grad;
  const auto model = make_model(spec);
  std::vector<Parameter> parameters;
  std::vector<torch::Tensor> torch_parameters;
  std::vector<int> first_of_unit;
  std::vector<torch::Tensor> decayed, undecayed;
  for (const UnitSpec& unit : spec.units) {
    first_of_unit.push_back(static_cast<int>(parameters.size()));
    for (const TensorSpec& tensor : unit.tensors) {
      auto master = torch::empty(tensor.shape);
      weights(tensor, 0, {master.data_ptr<float>(), static_cast<std::size_t>(master.numel())});
      parameters.push_back({master, torch::zeros_like(master), torch::zeros_like(master), tensor.decays});
      torch_parameters.push_back(master.clone());
      (tensor.decays ? decayed : undecayed).push_back(torch_parameters.back());
    }
  }
  torch::optim::AdamW reference(
      {torch::optim::OptimizerParamGroup(
           decayed, std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(kLr).weight_decay(kDecay))),
       torch::optim::OptimizerParamGroup(
           undecayed, std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(kLr).weight_decay(0)))},
      torch::optim::AdamWOptions(kLr));
  for (int step = 1; step <= kSteps; ++step) {
    const std::vector<MicroBatch> batches{some_batch(step, 0), some_batch(step, 1)};
    const StepResult streamed = session.step(batches);

    std::vector<torch::Tensor> sums;
    for (const Parameter& parameter : parameters) sums.push_back(torch::zeros_like(parameter.master));
    double loss = 0;
    const int last = static_cast<int>(spec.stages.size()) - 1;
    const auto bound = [&](int stage, Weights& of_weights, Gradients& of_gradients) {
      for (int unit : spec.stages[stage].units)
        for (std::size_t t = 0; t < spec.units[unit].tensors.size(); ++t) {
          of_weights.push_back(hi_of(parameters[first_of_unit[unit] + t].master));
          of_gradients.push_back(sums[first_of_unit[unit] + t]);
        }
    };
    std::vector<Shared> shared;
    for (const MicroBatch& batch : batches) shared.push_back(model->share(batch, torch::kCPU));
    std::vector<std::vector<Carry>> inputs;
    std::vector<Carry> carries(2);
    for (int stage = 0; stage < last; ++stage) {
      inputs.push_back(carries = as_taken(spec.stages[stage], carries));
      Weights w;
      Gradients g;
      bound(stage, w, g);
      for (std::size_t i = 0; i < carries.size(); ++i)
        carries[i] = model->forward(stage, w, carries[i], shared[i], true);
    }
    carries = as_taken(spec.stages[last], carries);
    for (std::size_t i = 0; i < carries.size(); ++i) {
      Weights w;
      Gradients g;
      bound(last, w, g);
      HeadResult head = model->head_loss_and_backward(w, g, carries[i], shared[i], 1.0 / 64);
      loss += head.loss_sum.item<double>();
      carries[i] = head.d_carry;
    }
    for (int stage = last - 1; stage >= 0; --stage) {
      carries = as_taken(spec.stages[stage], carries);
      Weights w;
      Gradients g;
      bound(stage, w, g);
      for (std::size_t i = 0; i < carries.size(); ++i)
        carries[i] = model->backward(stage, w, g, inputs[stage][i], shared[i], carries[i]);
    }
    EXPECT_EQ(streamed.loss, loss / 64) << "step " << step;
    update(parameters, sums, step);

    double squares = 0;
    for (std::size_t i = 0; i < sums.size(); ++i) {
      torch_parameters[i].mutable_grad() = sums[i].to(torch::kBFloat16).to(torch::kFloat32);
      squares += torch_parameters[i].grad().to(torch::kDouble).square().sum().item<double>();
    }
    for (torch::Tensor& parameter : torch_parameters)
      parameter.mutable_grad().mul_(std::min(1.0, kClip / (std::sqrt(squares) + 1e-6)));
    reference.step();
  }
  for (std::size_t unit = 0; unit < spec.units.size(); ++unit)
    for (std::size_t t = 0; t < spec.units[unit].tensors.size(); ++t) {
      const std::vector<float> streamed = session.master(static_cast<int>(unit), static_cast<int>(t));
      const torch::Tensor& plain = parameters[first_of_unit[unit] + t].master;
      EXPECT_EQ(std::memcmp(streamed.data(), plain.data_ptr(), 4 * streamed.size()), 0)
          << spec.units[unit].tensors[t].name;
      EXPECT_LT((plain - torch_parameters[first_of_unit[unit] + t]).abs().max().item<double>(), 2e-6)
          << spec.units[unit].tensors[t].name;
    }
}

INSTANTIATE_TEST_SUITE_P(Models, PlainLoop, ::testing::ValuesIn(cases()), case_name);

// One's own modules, with a plain whole-graph autograd loop beside them.
struct OwnEmbedding : Layer {
  OwnEmbedding() : table(register_module("table", torch::nn::Embedding(96, 24))) {}
  Carry forward(const Carry&, const Shared& shared) override { return {table->forward(shared.ids)}; }
  torch::nn::Embedding table;
};
struct OwnBlock : Layer {
  OwnBlock()
      : up(register_module("up", torch::nn::Linear(24, 48))),
        down(register_module("down", torch::nn::Linear(48, 24))) {}
  Carry forward(const Carry& carry, const Shared&) override {
    return {carry[0] + down->forward(torch::dropout(torch::tanh(up->forward(carry[0])), dropout, is_training()))};
  }
  torch::nn::Linear up, down;
  double dropout = 0;
};
struct OwnOutput : Layer {
  OwnOutput() : out(register_module("out", torch::nn::Linear(24, 96))) {}
  Carry forward(const Carry& carry, const Shared&) override { return {out->forward(carry[0])}; }
  torch::nn::Linear out;
};
struct OwnLoss : Layer {  // a last layer without parameters
  Carry forward(const Carry& carry, const Shared& shared) override {
    return {
        torch::nn::functional::cross_entropy(carry[0].to(torch::kFloat32).flatten(0, 1), shared.labels.flatten(),
                                             torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum))};
  }
};

Layers own_layers(double dropout = 0) {
  Layers layers;
  layers.add("embedding", [] { return std::make_shared<OwnEmbedding>(); })
      .repeat(3, "blocks",
              [dropout] {
                auto block = std::make_shared<OwnBlock>();
                block->dropout = dropout;
                return block;
              })
      .add("output", [] { return std::make_shared<OwnOutput>(); })
      .add("loss", [] { return std::make_shared<OwnLoss>(); });
  return layers;
}

TEST(OwnModules, SameBitsAsAWholeGraph) {
  DeviceMemory::install();
  Session session(own_layers().build(9), options(), {.lr = kLr, .weight_decay = kDecay});

  std::vector<std::shared_ptr<Layer>> modules;
  const std::vector<LayerFactory> factories{
      [] { return std::make_shared<OwnEmbedding>(); }, [] { return std::make_shared<OwnBlock>(); },
      [] { return std::make_shared<OwnBlock>(); },     [] { return std::make_shared<OwnBlock>(); },
      [] { return std::make_shared<OwnOutput>(); },    [] { return std::make_shared<OwnLoss>(); }};
  std::vector<Parameter> parameters;
  for (std::size_t i = 0; i < factories.size(); ++i) {
    torch::manual_seed(9 + i);
    modules.push_back(factories[i]());
    for (const torch::Tensor& value : modules.back()->parameters()) {
      const auto master = value.detach().clone();
      parameters.push_back({master, torch::zeros_like(master), torch::zeros_like(master), master.dim() >= 2});
    }
    modules.back()->to(torch::kBFloat16);
  }
  EXPECT_FALSE(torch::equal(modules[1]->parameters()[0], modules[2]->parameters()[0]))
      << "layers must differ for the test to mean anything";
  for (int step = 1; step <= kSteps; ++step) {
    const std::vector<MicroBatch> batches{some_batch(step, 0), some_batch(step, 1)};
    const StepResult streamed = session.step(batches);
    std::vector<torch::Tensor> sums;
    std::size_t next = 0;
    for (const auto& module : modules)
      for (torch::Tensor value : module->parameters()) {
        const torch::NoGradGuard no_grad;
        value.copy_(hi_of(parameters[next].master));
        sums.push_back(torch::zeros_like(parameters[next++].master));
      }
    double loss = 0;
    for (const MicroBatch& batch : batches) {
      const Shared shared{batch.ids, batch.labels, {}};
      Carry carry;
      for (const auto& module : modules) carry = module->forward(carry, shared);
      loss += carry[0].item<double>();
      (carry[0] * torch::full({}, 1.0F / 64)).backward();
      std::size_t index = 0;
      for (const auto& module : modules)
        for (torch::Tensor value : module->parameters()) {
          const torch::NoGradGuard no_grad;
          sums[index++].add_(value.grad());
          value.mutable_grad().reset();
        }
    }
    EXPECT_EQ(streamed.loss, loss / 64) << "step " << step;
    update(parameters, sums, step);
  }
  std::size_t next = 0;
  const ModelSpec& spec = session.model().spec();
  for (std::size_t unit = 0; unit < spec.units.size(); ++unit)
    for (std::size_t t = 0; t < spec.units[unit].tensors.size(); ++t, ++next) {
      const std::vector<float> streamed = session.master(static_cast<int>(unit), static_cast<int>(t));
      EXPECT_EQ(std::memcmp(streamed.data(), parameters[next].master.data_ptr(), 4 * streamed.size()), 0)
          << spec.units[unit].tensors[t].name;
    }
}

TEST(OwnModules, StreamedIsResidentWithDropout) {
  DeviceMemory::install();
  const auto folder = std::filesystem::current_path() / "own-modules-test";
  const auto run = [&](bool stream) {
    SessionOptions with = options();
    if (stream) {
      with.storage = {folder};
      with.allow_buffered = with.allow_any_filesystem = true;
      with.host_memory = 72 * 1024;
    }
    Session session(own_layers(0.2).build(9), with, {.lr = kLr});
    std::vector<double> losses;
    for (int step = 1; step <= kSteps; ++step)
      losses.push_back(session.step({some_batch(step, 0), some_batch(step, 1)}).loss);
    losses.push_back(session.evaluate({some_batch(50, 0)}).loss);
    if (stream) {
      EXPECT_GT(session.drives().at(0).bytes_read, 0U);
    }
    return losses;
  };
  EXPECT_EQ(run(true), run(false));
  std::filesystem::remove_all(folder);
}

struct OwnBuffer : OwnBlock {
  OwnBuffer() { register_buffer("scale", torch::rand({1})); }
};

TEST(OwnModules, BuffersThatDifferAreRefused) {
  DeviceMemory::install();
  Layers layers;
  layers.add("embedding", [] { return std::make_shared<OwnEmbedding>(); })
      .repeat(2, "blocks", [] { return std::make_shared<OwnBuffer>(); })
      .add("output", [] { return std::make_shared<OwnOutput>(); })
      .add("loss", [] { return std::make_shared<OwnLoss>(); });
  EXPECT_THROW(Session(layers.build(), options()), Exception);
}

}  // namespace
}  // namespace tierflow::testing

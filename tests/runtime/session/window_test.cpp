// Training by projected gradients, in windows: the same bits in memory and from storage, weights that are written once
// a window, and a run that goes on across the beginning of one.
#include <gtest/gtest.h>
#include <torch/utils.h>

#include <csignal>
#include <functional>
#include <limits>
#include <map>
#include <set>

#include "runtime/base/signals.h"
#include "runtime/device/device_memory.h"
#include "runtime/session/gradient_init.h"
#include "runtime/session/window_sum.h"
#include "runtime/spec/adapters.h"
#include "tests/runtime/expect.h"
#include "tests/runtime/session/fixture.h"

namespace tierflow::testing {
namespace {

constexpr int kSteps = 5;  // windows of two: the last one is cut short
const AdapterConfig kGalore{
    .rank = 4, .exclude = {"shared_expert_gate"}, .init = AdapterInit::galore, .windows = {.steps = 2, .scale = 0.5}};

Model projected(const Case& which, const AdapterConfig& config = kGalore) {
  return with_adapters(plain_model(which), config, 5);
}

struct Steps {
  std::vector<double> losses, norms;
  std::vector<std::vector<float>> masters;
};

void step(Session& session, Steps& run) {
  const auto done = static_cast<int>(session.steps());
  if (session.waits_for_gradient()) session.begin_with_gradient(batches(2, done));
  run.losses.resize(static_cast<std::size_t>(done));
  run.norms.resize(static_cast<std::size_t>(done));
  const StepResult result = session.step(batches(2, done), 1e-2);
  run.losses.push_back(result.loss);
  run.norms.push_back(result.grad_norm);
}

void train(Session& session, std::int64_t up_to, Steps& run) {
  while (session.steps() < up_to) step(session, run);
  run.masters = masters_of(session);
}

Steps trained(const Model& model, const SessionOptions& options) {
  Session session(model, options);
  Steps run;
  train(session, kSteps, run);
  return run;
}

// Streamed, with as little host memory as works, and a little more.
SessionOptions little(const Model& model, const SessionOptions& options, const Folder& folder) {
  SessionOptions small = streamed(options, folder);
  small.host_memory = 1;
  try {
    const Session refused(model, small);
  } catch (const Exception& error) {
    const std::string said = "the smallest that works is ", text = error.what();
    small.host_memory = (std::stoull(text.substr(text.find(said) + said.size())) + 16) * 1024;
  }
  return small;
}

class SessionWindows : public ::testing::TestWithParam<std::string> {
 protected:
  Model model() const { return projected(case_called(GetParam())); }
  SessionOptions small(bool clipped, Precision precision = Precision::fp32_master_adam8) const {
    SessionOptions options = resident(2);
    options.precision = precision;
    if (!clipped) options.clip.reset();
    return little(model(), options, folder_);
  }
  static SessionOptions large(bool clipped, Precision precision = Precision::fp32_master_adam8) {
    SessionOptions options = resident(2);
    options.precision = precision;
    if (!clipped) options.clip.reset();
    return options;
  }
  void expect_equal(const Steps& found, const Steps& expected) const {
    EXPECT_EQ(found.losses, expected.losses);
    EXPECT_EQ(found.norms, expected.norms);
    EXPECT_TRUE(found.masters == expected.masters);
  }

  const Folder folder_;
};

TEST_P(SessionWindows, StreamedIsResident) {
  for (const bool clipped : {true, false})
    for (const Precision precision : {Precision::fp32_master_adam8, Precision::bf16_sr_adam8}) {
      SessionOptions options = small(clipped, precision);
      options.chaos_seed = 7;
      expect_equal(trained(model(), options), trained(model(), large(clipped, precision)));
    }
}

// Without clipping, updates run at once and leave nothing of their units on the device; with it, the device has the
// units of the pass when a window begins.
TEST_P(SessionWindows, ANormThatNeverClipsChangesNothing) {
  SessionOptions never = large(true);
  never.clip = 1e9;
  expect_equal(trained(model(), never), trained(model(), large(false)));
}

TEST_P(SessionWindows, ARunGoesOnToTheBitAcrossTheBeginningOfOne) {
  const Steps expected = trained(model(), large(true));
  // None of what is rewritten lies in memory, or all of it.
  const SessionOptions tight = small(true);
  for (const std::uint64_t host : {tight.host_memory, 64 * kMiB}) {
    SessionOptions options = tight;
    options.host_memory = host;
    options.commit_every = 1;
    Steps run;
    for (const std::int64_t stop : {2, 3, 4, kSteps}) {
      Session session(model(), options);
      train(session, stop, run);
      // Left after a step that was not committed beside another, before the next window or inside of one.
      if (stop == kSteps) session.discard();
      options.resume = true;
    }
    expect_equal(run, expected);
  }
}

TEST_P(SessionWindows, WeightsAreWrittenOnceAWindow) {
  const SessionOptions options = small(true);
  Session session(model(), options);
  const std::vector<UnitSpec>& units = session.model().spec().units;
  Steps run;
  train(session, 2, run);
  std::vector<std::vector<float>> before = run.masters;
  train(session, 4, run);
  std::size_t i = 0, weights = 0;
  for (const UnitSpec& unit : units) {
    std::map<std::string, std::size_t> a, b;  // of a module, in `before`
    for (std::size_t t = 0; t < unit.tensors.size(); ++t) {
      const AdapterPart part = adapter_part(unit.tensors[t]);
      if (part == AdapterPart::a) a[linear_module(unit.tensors[t])] = i + t;
      if (part == AdapterPart::b) b[linear_module(unit.tensors[t])] = i + t;
    }
    for (const TensorSpec& tensor : unit.tensors) {
      const std::string module = linear_module(tensor);
      if (tensor.rewritten == Rewritten::master) {
        ++weights;
        const auto of = [&](const std::vector<float>& values, std::int64_t rows) {
          return torch::tensor(values).view({rows, -1});
        };
        const torch::Tensor product =
            torch::mm(of(before[b.at(module)], static_cast<std::int64_t>(before[b.at(module)].size()) / 4),
                      of(before[a.at(module)], 4));
        const bool transposed = has_transposed_weights(session.model().spec());
        const torch::Tensor added = of(run.masters[i], tensor.shape[0]) - of(before[i], tensor.shape[0]);
        EXPECT_GT(product.norm().item<double>(), 0) << tensor.name;
        EXPECT_LT((added - (transposed ? product.t() : product)).norm().item<double>(),
                  1e-4 * product.norm().item<double>())
            << tensor.name;
      } else if (!tensor.trainable && !is_adapter(tensor)) {
        EXPECT_TRUE(run.masters[i] == before[i]) << tensor.name;
      } else {
        EXPECT_FALSE(run.masters[i] == before[i]) << tensor.name;
      }
      ++i;
    }
  }
  EXPECT_GT(weights, 0U);
  // They are written where a window begins. Inside of it they stay, and nothing of them is written.
  std::uint64_t base = 0, a_step = 0;
  const SessionPlan& plan = session.plan();
  for (const swap::Chunk& chunk : plan.layout->chunks()) {
    if (chunk.rewritten) base += chunk.word_bytes() + chunk.state_bytes;
    if (!chunk.trainable) continue;
    if (!plan.arrangement.hi_resident[chunk.id]) a_step += chunk.word_bytes();
    if (!plan.arrangement.state_resident[chunk.id]) a_step += chunk.state_bytes;
    if (!plan.arrangement.gradient_resident[chunk.id]) a_step += chunk.word_bytes();
  }
  const double loss = session.evaluate(batches(2, 4)).loss;
  std::uint64_t written = session.bytes_written();
  const std::uint64_t expected = session.bytes_written_after_next_step();
  session.begin_with_gradient(batches(2, 4));
  EXPECT_GE(session.bytes_written() - written, base);
  before = masters_of(session);
  i = 0;
  for (const UnitSpec& unit : units)
    for (const TensorSpec& tensor : unit.tensors) {
      if (is_adapter(tensor)) {
        EXPECT_EQ(std::ranges::all_of(before[i], [](float value) { return value == 0; }), tensor.trainable)
            << tensor.name;
      }
      ++i;
    }
  EXPECT_NEAR(session.evaluate(batches(2, 4)).loss, loss, 2e-2 * loss);
  written = session.bytes_written();
  session.step(batches(2, 4), 1e-2);
  EXPECT_LE(session.bytes_written(), expected);
  session.step(batches(2, 5), 1e-2);
  EXPECT_LE(session.bytes_written() - written, 2 * a_step);
  const std::vector<std::vector<float>> after = masters_of(session);
  i = 0;
  for (const UnitSpec& unit : units)
    for (const TensorSpec& tensor : unit.tensors) {
      EXPECT_EQ(after[i] == before[i], !tensor.trainable) << tensor.name;
      ++i;
    }
}

TEST_P(SessionWindows, TheResultIsTheWholeModelWithTheWindowAtHand) {
  const Case which = case_called(GetParam());
  SessionOptions options = small(true);
  options.commit_every = 1;
  Session session(model(), options);
  Steps run;
  train(session, 3, run);
  session.export_hf(folder_.path / "now");
  session.commit();
  // The export changed nothing.
  EXPECT_TRUE(masters_of(session) == run.masters);
  const Model written = load(folder_.path / "now");
  EXPECT_TRUE(written.spec().adapter_config_json.empty());
  std::size_t i = 0, compared = 0;
  for (const UnitSpec& unit : session.model().spec().units) {
    std::map<std::string, torch::Tensor> a, b;
    for (std::size_t t = 0; t < unit.tensors.size(); ++t) {
      const TensorSpec& tensor = unit.tensors[t];
      if (!is_adapter(tensor)) continue;
      (adapter_part(tensor) == AdapterPart::a ? a : b)[linear_module(tensor)] =
          torch::tensor(run.masters[i + t]).view(tensor.shape);
    }
    for (const TensorSpec& tensor : unit.tensors) {
      const std::size_t at = i++;
      if (is_adapter(tensor)) continue;
      torch::Tensor expected = torch::tensor(run.masters[at]).view(tensor.shape);
      if (tensor.rewritten == Rewritten::master) {
        const torch::Tensor product = torch::mm(b.at(linear_module(tensor)), a.at(linear_module(tensor)));
        expected = expected + (has_transposed_weights(session.model().spec()) ? product.t() : product);
        ++compared;
      }
      torch::Tensor found = torch::empty(tensor.shape, torch::kFloat32);
      written.weights(tensor, 0, {found.data_ptr<float>(), static_cast<std::size_t>(found.numel())});
      EXPECT_LE((found - expected).abs().max().item<double>(), 4.1e-3 * expected.abs().max().item<double>())
          << tensor.name;
    }
  }
  EXPECT_GT(compared, 0U);
}

INSTANTIATE_TEST_SUITE_P(Models, SessionWindows, ::testing::Values("llama", "gpt2", "mixtral"),
                         [](const auto& info) { return info.param; });

// Blocks and the vocabulary in parts: a window's tensors are found in each.
TEST(Windows, AreTheSameInHalvesOfBlocks) {
  const Folder folder;
  const Case which = case_called("llama");
  const Model model = with_adapters(plain_model(which, kTiled), kGalore, 5);
  const SessionOptions options = little(model, resident(2), folder);
  const Steps found = trained(model, options), expected = trained(model, resident(2));
  EXPECT_EQ(found.losses, expected.losses);
  EXPECT_TRUE(found.masters == expected.masters);
}

TEST(Windows, WhatIsNotNamedIsTrainedWholeOrAsItWasChosen) {
  const Case which = case_called("llama");
  const Model plain = plain_model(which);
  AdapterConfig config = kGalore;
  config.targets = {"q_proj", "down_proj"};
  const auto trainable = [](const Model& model) {
    std::set<std::string> names;
    for (const UnitSpec& unit : model.spec().units)
      for (const TensorSpec& tensor : unit.tensors)
        if (tensor.trainable) names.insert(tensor.name);
    return names;
  };
  const std::string block = "model.layers.1.", beside = "base_model.model." + block;
  const std::set<std::string> all = trainable(with_adapters(plain, config, 5));
  for (const std::string& name : {std::string("model.embed_tokens.weight"), std::string("lm_head.weight"),
                                  block + "self_attn.k_proj.weight", block + "input_layernorm.weight",
                                  beside + "self_attn.q_proj.lora_B.weight", beside + "mlp.down_proj.lora_A.weight"})
    EXPECT_TRUE(all.contains(name)) << name;
  for (const std::string& name : {block + "self_attn.q_proj.weight", beside + "self_attn.q_proj.lora_A.weight",
                                  block + "mlp.down_proj.weight", beside + "mlp.down_proj.lora_B.weight"})
    EXPECT_FALSE(all.contains(name)) << name;
  const std::set<std::string> some = trainable(with_adapters(
      with_trainable(plain, {.freeze = {"embed_tokens", "layernorm", "q_proj", "layers.0."}}), config, 5));
  EXPECT_FALSE(some.contains("model.embed_tokens.weight") || some.contains(beside + "self_attn.q_proj.lora_B.weight"));
  EXPECT_TRUE(some.contains(block + "self_attn.k_proj.weight") &&
              some.contains(beside + "mlp.down_proj.lora_A.weight"));
}

TEST(Windows, WhatCannotBeIsSaid) {
  const Case which = case_called("llama");
  const Model plain = plain_model(which);
  const auto refused = [&](std::initializer_list<std::string_view> words,
                           const std::function<void(AdapterConfig & config)>& change) {
    AdapterConfig config = kGalore;
    change(config);
    expect_refusal(io::ErrorKind::usage, words, [&] { with_adapters(plain, config, 5); });
  };
  refused({"model.layers.0.self_attn.k_proj.weight has no projector of rank 17", "smaller side is 16"},
          [](AdapterConfig& config) { config.rank = 17; });
  refused({"windows of at least 1 step"}, [](AdapterConfig& config) { config.windows.steps = 0; });
  refused({"a scale above 0"}, [](AdapterConfig& config) { config.windows.scale = 0; });
  refused({"have no dropout"}, [](AdapterConfig& config) { config.dropout = 0.1; });
  refused({"train whole what is not projected"}, [](AdapterConfig& config) { config.saved = {"lm_head"}; });
  refused({"not with factors of the base"}, [](AdapterConfig& config) { config.dora = true; });
  const Model model = projected(which);
  expect_refusal(io::ErrorKind::usage, {"they stay in bf16"}, [&] { with_base_format(model, WeightFormat::nf4); });
  expect_refusal(io::ErrorKind::usage, {"no linear layer is left to adapt"},
                 [&] { with_adapters(with_base_format(plain, WeightFormat::nf4), kGalore, 5); });
  expect_refusal(io::ErrorKind::usage, {"chosen before gradients are projected"},
                 [&] { with_trainable(model, {.freeze = {"norm"}}); });
  Session session(model, resident(2));
  expect_refusal(io::ErrorKind::usage, {"the next window needs its projector first"}, [&] {
    Session waiting(model, resident(2));
    waiting.step(batches(2, 0), 1e-2);
  });
  EXPECT_TRUE(session.waits_for_gradient());
  session.begin_with_gradient(batches(2, 0));
  EXPECT_FALSE(session.waits_for_gradient());
  expect_refusal(io::ErrorKind::usage, {"the window of this projector has not ended"},
                 [&] { session.begin_with_gradient(batches(2, 0)); });
  expect_refusal(io::ErrorKind::usage, {"the model has no adapters: export_hf() writes it"}, [&] {
    Session other(model, resident(2));
    other.export_adapter("nowhere");
  });
  SessionOptions pairs = resident(2);
  pairs.loss.kind = LossKind::dpo;
  expect_refusal(io::ErrorKind::usage, {"a loss of pairs has none"}, [&] { Session of_pairs(model, pairs); });
}

// Another window, scale or rank is another run.
TEST(Windows, BelongToTheRun) {
  const Folder folder;
  const Case which = case_called("llama");
  SessionOptions options = little(projected(which), resident(2), folder);
  options.commit_every = 1;
  {
    Session session(projected(which), options);
    Steps run;
    train(session, 1, run);
  }
  options.resume = true;
  for (const Windows windows : {Windows{.steps = 3, .scale = 0.5}, Windows{.steps = 2, .scale = 1}}) {
    AdapterConfig other = kGalore;
    other.windows = windows;
    expect_refusal(io::ErrorKind::usage, {"its adapter is not this one's"},
                   [&] { Session session(projected(which, other), options); });
  }
}

// A weight is in several chunks, whose ends lie anywhere in its rows.
TEST(WindowSum, IsTheSameHoweverAWeightIsCut) {
  const auto json = [](const char* more) {
    return std::string(R"({"architectures": ["LlamaForCausalLM"], "vocab_size": 16, "hidden_size": 520,
      "intermediate_size": 1200, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4)") +
           more + "}";
  };
  const std::string gpt2 = R"({"architectures": ["GPT2LMHeadModel"], "vocab_size": 16, "n_embd": 520, "n_layer": 1,
    "n_head": 4, "n_positions": 8})";
  for (const std::string& of : {json(""), gpt2}) {
    ModelSpec spec = parse_model_spec(of, "wide");
    add_adapters(spec, kGalore);
    const std::vector<TensorSpec>& tensors = spec.units.at(1).tensors;
    std::vector<torch::Tensor> masters;
    for (const TensorSpec& tensor : tensors) masters.push_back(torch::randn(tensor.shape));
    const auto values_of = [](const torch::Tensor& tensor) {
      return std::span<float>(tensor.data_ptr<float>(), static_cast<std::size_t>(tensor.numel()));
    };
    const WindowSum sum(spec, 1, [&](int tensor, const UseMaster& use) { use(values_of(masters.at(tensor))); });
    std::size_t cut = 0;
    for (int i = 0; i < static_cast<int>(tensors.size()); ++i) {
      const TensorSpec& tensor = tensors.at(i);
      const torch::Tensor whole = masters[i].clone(), parts = masters[i].clone();
      sum.add_to(i, 0, values_of(whole));
      for (std::uint64_t first = 0, count = 70'001; first < static_cast<std::uint64_t>(whole.numel()); first += count)
        sum.add_to(i, first,
                   values_of(parts).subspan(
                       first, std::min<std::uint64_t>(count, static_cast<std::uint64_t>(whole.numel()) - first)));
      EXPECT_TRUE(parts.equal(whole)) << tensor.name;
      if (tensor.rewritten != Rewritten::master) {
        EXPECT_TRUE(whole.equal(masters[i])) << tensor.name;
        continue;
      }
      ++cut;
      torch::Tensor a, b;
      for (std::size_t j = 0; j < tensors.size(); ++j)
        if (is_adapter(tensors[j]) && linear_module(tensors[j]) == linear_module(tensor))
          (adapter_part(tensors[j]) == AdapterPart::a ? a : b) = masters[j];
      const torch::Tensor product = torch::mm(b, a);
      EXPECT_TRUE(
          torch::allclose(whole, masters[i] + (has_transposed_weights(spec) ? product.t() : product), 1e-4, 1e-4))
          << tensor.name;
    }
    EXPECT_EQ(cut, has_transposed_weights(spec) ? 4U : 7U);
  }
}

// Memory that runs out while the gradients of a stage are decomposed costs another try, and no bit.
TEST(Windows, ADecompositionIsTriedAgainWithTheSameGradients) {
  const Model model = projected(case_called("llama"));
  const ModelSpec& spec = model.spec();
  DeviceMemory& memory = DeviceMemory::install();
  const int stage = 1;  // a block
  const auto taken = [&](bool fails) {
    GradientInit found(spec, 7, torch::kCPU);
    std::size_t weights = 0;
    for (const int unit : spec.stages[stage].units)
      weights += spec.units[static_cast<std::size_t>(unit)].tensors.size();
    Gradients gradients(weights);
    found.bind(stage, 0, gradients);
    torch::manual_seed(3);
    for (const torch::Tensor& sum : gradients.tensors())
      if (sum.defined()) sum.normal_();
    if (fails) {
      memory.release_kept();
      memory.set_cap(memory.stats().held);
      EXPECT_THROW(found.take(stage), c10::Error);
      memory.set_cap(~std::uint64_t{0} / 2);
    }
    found.take(stage);
    std::vector<float> all;
    for (const int unit : spec.stages[stage].units)
      for (const TensorSpec& tensor : spec.units[static_cast<std::size_t>(unit)].tensors) {
        if (!is_adapter(tensor) || tensor.trainable) continue;
        const std::size_t begin = all.size();
        all.resize(begin + static_cast<std::size_t>(tensor.elements()));
        found.read(tensor, 0, std::span(all).subspan(begin));
      }
    return all;
  };
  const std::vector<float> expected = taken(false);
  ASSERT_FALSE(expected.empty());
  EXPECT_TRUE(taken(true) == expected);
}

TEST(Windows, NoGradientIsDecomposedAfterASignal) {
  const Model model = projected(case_called("llama"));
  const ModelSpec& spec = model.spec();
  GradientInit found(spec, 7, torch::kCPU);
  Gradients gradients(spec.units[static_cast<std::size_t>(spec.stages[1].units.front())].tensors.size());
  found.bind(1, 0, gradients);
  const TensorSpec* factor = nullptr;
  for (const TensorSpec& tensor : spec.units[static_cast<std::size_t>(spec.stages[1].units.front())].tensors)
    if (is_adapter(tensor) && !tensor.trainable) factor = &tensor;
  ASSERT_NE(factor, nullptr);
  std::vector<float> values(static_cast<std::size_t>(factor->elements()));
  watch_signals();
  std::raise(SIGTERM);
  found.take(1);
  EXPECT_THROW(found.read(*factor, 0, values), std::out_of_range);
  watch_signals();  // forgets the signal
  found.take(1);
  found.read(*factor, 0, values);
}

// That gets a signal in the call of this number, and counts its calls. The first two of a pass make tables.
struct StoppedModel : ForwardingModel {
  using ForwardingModel::ForwardingModel;
  void called() const override {
    if (++calls == stops_at) std::raise(SIGTERM);
  }
  mutable int calls = 0;
  int stops_at = 0;
};

// Wherever in the pass the signal comes, nothing is computed any more, and nothing has changed: who goes on, goes on as
// if there had been none.
TEST(Windows, ASignalWhileOneBeginsIsHeededAndLosesNothing) {
  const Model model = projected(case_called("llama"));
  const Steps expected = trained(model, resident(2));
  const Folder folder;
  const SessionOptions small = little(model, resident(2), folder);
  for (const SessionOptions& options : {resident(2), small}) {
    watch_signals();
    const auto stopped = std::make_shared<StoppedModel>(make_model(model.spec()));
    Session session({stopped, model.weights}, options);
    Steps run;
    train(session, 2, run);
    const int before = stopped->calls;
    session.begin_with_gradient(batches(2, 2));
    const int all = stopped->calls - before;
    for (; session.steps() < 4;) step(session, run);
    ASSERT_TRUE(session.waits_for_gradient());
    const std::vector<std::vector<float>> masters = masters_of(session);
    for (const int at : {3, all / 3, 2 * all / 3, all}) {
      stopped->calls = 0;
      stopped->stops_at = at;
      session.begin_with_gradient(batches(2, 4));
      EXPECT_EQ(stopped->calls, at) << "of " << all;
      EXPECT_TRUE(session.waits_for_gradient());
      EXPECT_TRUE(masters_of(session) == masters);
      watch_signals();  // forgets the signal
    }
    train(session, kSteps, run);
    EXPECT_EQ(run.losses, expected.losses);
    EXPECT_TRUE(run.masters == expected.masters);
  }
}

// Whose gradients are no numbers while it is broken.
struct BreakingModel : ForwardingModel {
  using ForwardingModel::ForwardingModel;
  HeadResult head_loss_and_backward(const Weights& weights, const Gradients& gradients, const Carry& carry,
                                    const Shared& shared, const models::TokenScale& scale) const override {
    HeadResult result = ForwardingModel::head_loss_and_backward(weights, gradients, carry, shared, scale);
    if (broken) result.d_carry.at(0).fill_(std::numeric_limits<float>::quiet_NaN());
    return result;
  }
  bool broken = false;
};

// The window before goes on, the step is skipped as any other, and the next step asks again.
TEST(Windows, WithoutAFiniteGradientNoneBegins) {
  const Model model = projected(case_called("llama"));
  const auto breaking = std::make_shared<BreakingModel>(make_model(model.spec()));
  Session session({breaking, model.weights}, resident(2));
  Steps run;
  train(session, 2, run);
  ASSERT_TRUE(session.waits_for_gradient());
  breaking->broken = true;
  session.begin_with_gradient(batches(2, 2));
  EXPECT_TRUE(masters_of(session) == run.masters);
  EXPECT_TRUE(session.step(batches(2, 2), 1e-2).skipped);
  EXPECT_TRUE(masters_of(session) == run.masters);
  breaking->broken = false;
  ASSERT_TRUE(session.waits_for_gradient());
  step(session, run);
  EXPECT_FALSE(session.waits_for_gradient());
  EXPECT_FALSE(masters_of(session) == run.masters);
}

}  // namespace
}  // namespace tierflow::testing

// Adapters over a base that streams: the same bits in memory and from storage, the base as it was, and a run that goes
// on.
#include <gtest/gtest.h>

#include <functional>

#include "runtime/planning/loading.h"
#include "tests/runtime/expect.h"
#include "tests/runtime/session/adapter_steps.h"

namespace tierflow::testing {
namespace {

Model adapted(const Case& which, const AdapterConfig& config = {.rank = 4, .alpha = 8}) {
  return with_adapters(plain_model(which), config, 5);
}

Steps trained(const Case& which, const SessionOptions& options, const AdapterConfig& config = {.rank = 4, .alpha = 8}) {
  Session session(adapted(which, config), options, {.weight_decay = 0.1});
  Steps run;
  train(session, options, kSteps, run);
  return run;
}

class SessionAdapters : public ::testing::TestWithParam<Case> {
 protected:
  SessionOptions small(bool clipped) const {
    SessionOptions options = resident(2);
    if (!clipped) options.clip.reset();
    return streamed(options, folder_);
  }
  // Trains, at once and streamed and gone on with: what is trained changes, what is frozen does not, and both have the
  // same bits. at_first: sees each session before it trains, and the masters that it has then.
  void expect_streamed_as_resident(
      const Model& model,
      const std::function<void(Session& session, const std::vector<std::vector<float>>& first)>& at_first =
          [](Session&, const std::vector<std::vector<float>>&) {}) {
    const auto run_of = [&](SessionOptions options, const std::vector<std::int64_t>& stops) {
      Steps run;
      for (const std::int64_t up_to : stops) {
        Session session(model, options, {.weight_decay = 0.1});
        const std::vector<std::vector<float>> first = masters_of(session);
        at_first(session, first);
        train(session, options, up_to, run);
        std::size_t i = 0;
        for (const UnitSpec& unit : session.model().spec().units)
          for (const TensorSpec& tensor : unit.tensors) {
            EXPECT_EQ(run.masters[i] == first[i], !tensor.trainable) << tensor.name;
            ++i;
          }
        if (up_to == kSteps) session.discard();
        options.resume = true;
        options.host_memory = small(true).host_memory;  // nothing is loaded any more
      }
      return run;
    };
    const Steps expected = run_of(resident(2), {kSteps});
    SessionOptions options = small(true);
    options.host_memory += loading_bytes(model.spec());
    options.commit_every = 1;
    const Steps found = run_of(options, {2, kSteps});
    EXPECT_EQ(found.losses, expected.losses);
    EXPECT_TRUE(found.masters == expected.masters);
  }

  const Folder folder_;
};

// One model of each layout of linear layers: with biases, fused, transposed, tied, of experts.
class AdaptersByLayout : public SessionAdapters {};
std::vector<Case> layouts() {
  std::vector<Case> chosen;
  for (const char* name :
       {"llama", "llama_biases", "phi3", "gpt_neox", "glm130b", "qwen2_moe", "gpt_oss", "llama4", "gpt2", "opt_untied"})
    chosen.push_back(case_called(name));
  return chosen;
}

TEST_P(SessionAdapters, StreamedIsResident) {
  for (const bool clipped : {true, false}) {
    SessionOptions options = resident(2);
    if (!clipped) options.clip.reset();
    const Steps expected = trained(GetParam(), options);
    options = small(clipped);
    options.chaos_seed = 7;
    const Steps found = trained(GetParam(), options);
    EXPECT_EQ(found.losses, expected.losses);
    EXPECT_TRUE(found.masters == expected.masters);
  }
}

TEST_P(SessionAdapters, TheBaseStaysAsItWasAndIsNeverWritten) {
  const SessionOptions options = small(true);
  Session session(adapted(GetParam()), options);
  const std::vector<std::vector<float>> before = masters_of(session);
  Steps run;
  train(session, options, 1, run);
  const auto written = [&] { return session.lanes()[static_cast<std::size_t>(swap::Lane::disk_write)].bytes; };
  const std::uint64_t first = written();
  train(session, options, kSteps, run);
  std::size_t i = 0;
  std::uint64_t base = 0, adapters = 0;
  for (const UnitSpec& unit : session.model().spec().units)
    for (const TensorSpec& tensor : unit.tensors) {
      EXPECT_EQ(run.masters[i] == before[i], !tensor.trainable) << tensor.name;
      (tensor.trainable ? adapters : base) += static_cast<std::uint64_t>(tensor.elements());
      ++i;
    }
  EXPECT_GT(base, 3 * adapters);
  // Each chunk that is trained and not resident writes its words, state and gradient once a step; of the base nothing.
  const SessionPlan& plan = session.plan();
  std::uint64_t trained = 0;
  for (const swap::Chunk& chunk : plan.layout->chunks()) {
    if (!chunk.trainable) continue;
    if (!plan.arrangement.hi_resident[chunk.id]) trained += chunk.word_bytes();
    if (!plan.arrangement.state_resident[chunk.id]) trained += chunk.state_bytes;
    if (!plan.arrangement.gradient_resident[chunk.id]) trained += chunk.word_bytes();
  }
  EXPECT_LE((written() - first) / (kSteps - 1), trained);
}

TEST_P(SessionAdapters, ARunGoesOnToTheBit) {
  SessionOptions options = resident(2);
  const Steps expected = trained(GetParam(), options);
  options = small(true);
  options.commit_every = 1;
  Steps run;
  for (int round = 0; round < 3; ++round) {
    Session session(adapted(GetParam()), options, {.weight_decay = 0.1});
    train(session, options, round == 2 ? kSteps : session.steps() + 2, run);
    options.resume = true;
  }
  EXPECT_EQ(run.losses, expected.losses);
  EXPECT_TRUE(run.masters == expected.masters);
}

TEST_P(SessionAdapters, DropoutIsTheSameStreamed) {
  const AdapterConfig config{.rank = 4, .alpha = 8, .dropout = 0.3};
  const Steps expected = trained(GetParam(), resident(2), config), found = trained(GetParam(), small(true), config);
  EXPECT_EQ(found.losses, expected.losses);
  EXPECT_TRUE(found.masters == expected.masters);
  EXPECT_NE(found.losses, trained(GetParam(), resident(2)).losses);
}
// A base in another format is a base of bf16 weights with the values that the format leaves of them: to the bit, in
// memory and from storage, gone on with or not.
TEST_P(AdaptersByLayout, ABaseInAnotherFormatHasItsValues) {
  const Model plain = plain_model(GetParam());
  for (const auto& [format, init] : {std::pair{WeightFormat::int8, "default"},
                                     {WeightFormat::nf4, "default"},
                                     {WeightFormat::nf4_double, "olora"}}) {
    SCOPED_TRACE(weight_format_name(format));
    AdapterConfig config{.rank = 4, .alpha = 8, .exclude = {"shared_expert_gate"}};  // one output: rank 1
    set_adapter_init(config, init);
    const Model base = with_base_format(plain, format);
    const Model stored = with_adapters(base, config, 5);
    const auto format_of = [&](const std::string& name) {
      for (const UnitSpec& unit : base.spec().units)
        for (const TensorSpec& tensor : unit.tensors)
          if (tensor.name == name) return tensor.format;
      return WeightFormat::bf16;
    };
    const Model values{plain.layers, [&](const TensorSpec& tensor, std::uint64_t first, std::span<float> out) {
                         if (format_of(tensor.name) == WeightFormat::bf16) return plain.weights(tensor, first, out);
                         std::vector<float> all(static_cast<std::size_t>(tensor.elements()));
                         plain.weights(tensor, 0, all);
                         Quantiser quantiser(format, tensor.shape);
                         quantiser.add(all);
                         std::vector<std::uint16_t> words(out.size());
                         dequantise(format, tensor.shape, quantiser.finish(), first, words);
                         std::ranges::transform(words, out.begin(), optim::float_from_bf16);
                       }};
    const Model dense = with_adapters(values, config, 5);
    const auto run_of = [&](const Model& model, SessionOptions options, bool interrupted = false) {
      Steps run;
      for (const std::int64_t up_to :
           interrupted ? std::vector<std::int64_t>{2, kSteps} : std::vector<std::int64_t>{kSteps}) {
        Session session(model, options, {.weight_decay = 0.1});
        train(session, options, up_to, run);
        if (up_to == kSteps) session.discard();
        options.resume = true;
      }
      return run;
    };
    const Steps expected = run_of(dense, resident(2));
    const Steps kept = run_of(stored, resident(2));
    EXPECT_EQ(kept.losses, expected.losses);
    EXPECT_TRUE(kept.masters == expected.masters);
    for (const bool interrupted : {false, true}) {
      SessionOptions options = small(true);
      options.commit_every = interrupted ? 1 : 0;
      const Steps streamed = run_of(stored, options, interrupted);
      EXPECT_EQ(streamed.losses, expected.losses);
      EXPECT_TRUE(streamed.masters == expected.masters);
    }
  }
}

// The last name of its module.
std::string embedding_of(const Case& which) {
  std::string name = parse_model_spec(which.json, which.name).units.front().tensors.front().name;
  name.resize(name.rfind(".weight"));
  return name.substr(name.rfind('.') + 1);
}

// Embedding, head and norms trained whole, beside adapters over a base in any format: the same bits streamed and gone
// on with.
TEST_P(AdaptersByLayout, ModulesThatAreSavedStreamAsTheyAreResident) {
  const bool gpt2 = GetParam().name.starts_with("gpt2");
  const AdapterConfig config{.rank = 4, .alpha = 8, .saved = {embedding_of(GetParam()), gpt2 ? "ln_f" : "norm"}};
  for (const WeightFormat format : {WeightFormat::bf16, WeightFormat::nf4}) {
    const Model model = with_base_format(adapted(GetParam(), config), format);
    expect_streamed_as_resident(model);
  }
}

// Adapters that begin with factors of the base: the model begins as it is, bit for bit, and trains with the same bits
// streamed, gone on with, and beside a base that has the values of a format in bf16.
TEST_P(AdaptersByLayout, FirstValuesFromTheBaseAreTheSameStreamed) {
  const Model plain = plain_model(GetParam());
  for (const auto& [init, format] :
       {std::pair{"pissa", WeightFormat::bf16}, {"olora", WeightFormat::nf4}, {"pissa_niter_2", WeightFormat::int8}}) {
    SCOPED_TRACE(init);
    AdapterConfig config{.rank = 4, .alpha = 8, .exclude = {"shared_expert_gate"}};  // one output: rank 1
    set_adapter_init(config, init);
    const Model base = with_base_format(plain, format);
    const Model model = with_adapters(base, config, 5);
    expect_streamed_as_resident(model, [&](Session& session, const std::vector<std::vector<float>>& first) {
      if (session.steps() != 0) return;
      Session before(base, resident(2));
      EXPECT_EQ(session.evaluate(batches(2, 0)).loss, before.evaluate(batches(2, 0)).loss);
      std::size_t i = 0;
      for (const UnitSpec& unit : session.model().spec().units)
        for (const TensorSpec& tensor : unit.tensors) {
          if (adapter_part(tensor) == AdapterPart::initial_b) {
            EXPECT_TRUE(first[i] == first[i - 2]) << tensor.name;
            EXPECT_GT(std::ranges::max(first[i]), 0) << tensor.name;
          }
          ++i;
        }
    });
  }
  expect_refusal(io::ErrorKind::usage, {"of rank 40 cannot begin with factors of", "smaller side is"},
                 [&] { with_adapters(plain, {.rank = 40, .init = AdapterInit::olora}, 5); });
}

// Adapters that begin with the gradient of the base: one pass makes their first values, the same streamed, under any
// budget, clipped or not, and the model begins as it is. A run that is gone on with has them.
TEST_P(AdaptersByLayout, FirstValuesOfTheGradientAreTheSameStreamed) {
  const Model plain = plain_model(GetParam());
  AdapterConfig config{.rank = 2, .alpha = 8, .exclude = {"shared_expert_gate"}};
  for (const auto& [format, init] :
       {std::pair{WeightFormat::nf4, AdapterInit::peft_lora_ga}, std::pair{WeightFormat::bf16, AdapterInit::lora_ga}}) {
    config.init = init;
    const Model base = with_base_format(plain, format);
    const Model model = with_adapters(base, config, 5);
    const auto run_of = [&](SessionOptions options, const std::vector<std::int64_t>& stops) {
      Steps run;
      for (const std::int64_t up_to : stops) {
        Session session(model, options, {.weight_decay = 0.1});
        EXPECT_EQ(session.waits_for_gradient(), !options.resume);
        if (session.waits_for_gradient()) {
          expect_refusal(io::ErrorKind::usage, {"no first values yet"}, [&] {
            Session waiting(model, resident(2));
            waiting.step(batches(2, 0), 1e-2);
          });
          // A state without first values would never learn: both gradients would be zero.
          expect_refusal(io::ErrorKind::usage, {"no first values yet"}, [&] {
            Session waiting(model, resident(2));
            waiting.export_adapter(folder_.path / "waiting");
          });
          if (session.storage_mode())
            expect_refusal(io::ErrorKind::usage, {"no first values yet"}, [&] { session.commit(); });
          session.begin_with_gradient(batches(2, 0));
          Session before(base, resident(2));
          EXPECT_EQ(session.evaluate(batches(2, 0)).loss, before.evaluate(batches(2, 0)).loss);
          const std::vector<std::vector<float>> first = masters_of(session);
          std::size_t i = 0;
          for (const UnitSpec& unit : session.model().spec().units)
            for (const TensorSpec& tensor : unit.tensors) {
              const AdapterPart part = adapter_part(tensor);
              if (part == AdapterPart::initial_a || part == AdapterPart::initial_b) {
                EXPECT_TRUE(first[i] == first[i - 2]) << tensor.name;
                EXPECT_GT(std::ranges::max(first[i]), 0) << tensor.name;
              }
              ++i;
            }
        }
        EXPECT_FALSE(session.waits_for_gradient());
        train(session, options, up_to, run);
        if (up_to == kSteps) session.discard();
        options.resume = true;
      }
      return run;
    };
    for (const bool clipped : {true, false}) {
      SessionOptions options = resident(2);
      if (!clipped) options.clip.reset();
      const Steps expected = run_of(options, {kSteps});
      options = small(clipped);
      options.commit_every = clipped ? 1 : 0;
      const Steps found = run_of(options, clipped ? std::vector<std::int64_t>{2, kSteps} : std::vector{kSteps + 0L});
      EXPECT_EQ(found.losses, expected.losses);
      EXPECT_TRUE(found.masters == expected.masters);
    }
  }
  // Every micro-batch counts.
  const auto begun = [&](int first, int second) {
    Session session(with_adapters(plain, config, 5), resident(2));
    session.begin_with_gradient({batches(1, first)[0], batches(1, second)[0]});
    return masters_of(session);
  };
  EXPECT_FALSE(begun(0, 2) == begun(1, 2));
  EXPECT_FALSE(begun(2, 0) == begun(2, 1));
  expect_refusal(io::ErrorKind::usage, {"of rank 20 cannot begin with factors of", "gradient", "twice as many"},
                 [&] { with_adapters(plain, {.rank = 20, .init = AdapterInit::lora_ga}, 5); });
}

// Adapters with a magnitude (DoRA): the same bits streamed and gone on with, beside a base in any format.
TEST_P(AdaptersByLayout, MagnitudesStreamAsTheyAreResident) {
  const Model plain = plain_model(GetParam());
  for (const WeightFormat format : {WeightFormat::bf16, WeightFormat::nf4}) {
    const Model model = with_adapters(with_base_format(plain, format), {.rank = 4, .alpha = 8, .dora = true}, 5);
    expect_streamed_as_resident(model);
  }
}

// What is frozen stays as it is, and is neither read for an update nor written; the rest has the same bits streamed.
TEST_P(SessionAdapters, APartOfTheModelIsTrained) {
  const bool opt = GetParam().name.starts_with("opt"),
             moe = GetParam().name == "mixtral" || GetParam().name == "granite_moe",
             llama4 = GetParam().name == "llama4";
  const std::string embedding = embedding_of(GetParam());
  for (const TrainableConfig& config : {TrainableConfig{.last_layers = 1}, TrainableConfig{.trainable = {embedding}},
                                        TrainableConfig{.freeze = {opt      ? "fc"
                                                                   : moe    ? "sparse_moe"
                                                                   : llama4 ? "feed_forward"
                                                                            : "mlp",
                                                                   embedding}}}) {
    const Model model = with_trainable(plain_model(GetParam()), config);
    const auto run_of = [&](const SessionOptions& options) {
      Session session(model, options, {.weight_decay = 0.1});
      const std::vector<std::vector<float>> before = masters_of(session);
      Steps run;
      train(session, options, kSteps, run);
      std::size_t i = 0;
      for (const UnitSpec& unit : session.model().spec().units)
        for (const TensorSpec& tensor : unit.tensors) {
          if (!tensor.trainable) {
            EXPECT_TRUE(run.masters[i] == before[i]) << tensor.name;
          }
          ++i;
        }
      EXPECT_FALSE(run.masters == before);
      return run;
    };
    const Steps expected = run_of(resident(2)), found = run_of(small(true));
    EXPECT_EQ(found.losses, expected.losses);
    EXPECT_TRUE(found.masters == expected.masters);
  }
}

TEST_P(SessionAdapters, LearningRatesOfTensorsAreScaled) {
  const Model plain = plain_model(GetParam());
  const auto run_of = [&](const Model& model, const SessionOptions& options, double lr) {
    Session session(model, options, {.weight_decay = 0.1});
    for (int step = 0; step < kSteps; ++step) session.step(batches(2, step), lr);
    return masters_of(session);
  };
  const auto expected = run_of(plain, resident(2), 2e-3);
  EXPECT_TRUE(run_of(with_learning_rates(plain, {{".", 2}}), resident(2), 1e-3) == expected);
  EXPECT_TRUE(run_of(with_learning_rates(plain, {{".", 2}}), small(false), 1e-3) == run_of(plain, small(false), 2e-3));
  EXPECT_FALSE(run_of(with_learning_rates(plain, {{"weight", 2}}), resident(2), 2e-3) == expected);
}

INSTANTIATE_TEST_SUITE_P(Models, SessionAdapters, ::testing::ValuesIn(cases()), case_name);
INSTANTIATE_TEST_SUITE_P(Models, AdaptersByLayout, ::testing::ValuesIn(layouts()), case_name);

// The pass leaves words on the device where updates wait for the norm; those that follow are computed with.
TEST(SessionOfAdapters, FirstValuesOfTheGradientReachTheDevice) {
  const Model model = with_adapters({make_model(parse_model_spec(cases()[0].json, "llama")), initial(11)},
                                    {.rank = 2, .alpha = 8, .init = AdapterInit::lora_ga}, 5);
  const auto run_of = [&](std::optional<double> clip) {
    SessionOptions options = resident(2);
    options.clip = clip;
    Session session(model, options);
    session.begin_with_gradient(batches(2, 0));
    Steps run;
    train(session, options, kSteps, run);
    return run;
  };
  const Steps never = run_of(1e9), none = run_of(std::nullopt);
  EXPECT_EQ(never.losses, none.losses);
  EXPECT_TRUE(never.masters == none.masters);
}

TEST(SessionOfAdapters, LearnARepeatedBatch) {
  const SessionOptions options = resident(2);
  Session session(adapted(cases()[0], {.rank = 8, .alpha = 16}), options);
  std::vector<double> losses;
  for (int step = 0; step < 30; ++step) losses.push_back(session.step(batches(2, 0), 1e-2).loss);
  EXPECT_LT(losses.back(), 0.7 * losses.front());
}

}  // namespace
}  // namespace tierflow::testing

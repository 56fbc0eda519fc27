// Of a large embedding a step moves and updates the parts that its tokens use; the others get what they missed later.
// Losses, norms and weights have the bits of a run in memory, which updates all of it every step.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>

#include "runtime/device/device_memory.h"
#include "tests/runtime/expect.h"
#include "tests/runtime/session/spoiling_model.h"

namespace tierflow::testing {
namespace {

constexpr int kSteps = 9, kSpoiledGradient = 3, kSpoiledLoss = 5;
constexpr std::int64_t kRows = 16384;  // of 64 numbers: 128 parts

struct Setting {
  const char* name;
  bool clips = true, speculates = false;
  double deferred = 0, decay = 0;
  Precision precision = Precision::fp32_master_adam8;
  std::int64_t tile = INT64_MAX;  // elements
  std::uint64_t host = 5 * kMiB / 2;
  std::uint64_t part = swap::kSparseQuantum;
};
void PrintTo(const Setting& setting, std::ostream* out) {
  *out << setting.name;
}

// Some tokens come in most steps, others in one.
std::vector<MicroBatch> few_tokens(int step) {
  std::vector<MicroBatch> all;
  for (int i = 0; i < 2; ++i) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(100 * step + i);
    auto tokens = torch::randint(kRows, {1, 7}, generator, torch::kLong);
    tokens.narrow(1, 0, 2).remainder_(2048);
    all.push_back({.ids = tokens.narrow(1, 0, 6).contiguous(), .labels = tokens.narrow(1, 1, 6).contiguous()});
  }
  return all;
}

struct Seen {
  std::vector<double> losses, norms;
  double evaluated = 0;
  std::vector<std::vector<float>> masters;
  bool operator==(const Seen&) const = default;
};

class Rows : public ::testing::TestWithParam<Setting> {
 protected:
  Rows() { DeviceMemory::install(); }

  std::shared_ptr<Spoiling> model() const {
    std::string json = llama_json("LlamaForCausalLM", "");
    for (const auto& [from, to] : {std::pair{"\"vocab_size\": 96", "\"vocab_size\": 16384"},
                                   std::pair{"\"hidden_size\": 32", "\"hidden_size\": 64"}})
      json.replace(json.find(from), std::string(from).size(), to);
    return std::make_shared<Spoiling>(
        make_model(parse_model_spec(json, "rows", {.vocabulary_elements = GetParam().tile})));
  }
  SessionOptions in_memory() const {
    SessionOptions options{.device_memory = 128 * kMiB,
                           .host_memory = 128 * kMiB,
                           .precision = GetParam().precision,
                           .deferred_share = GetParam().deferred,
                           .micro_batch = 1,
                           .micro_batches = 2,
                           .sequence_length = 6,
                           .seed = 3};
    options.clip = GetParam().clips ? std::optional(1.5) : std::nullopt;
    return options;
  }
  SessionOptions on_storage() const {
    SessionOptions options = in_memory();
    options.storage = {folder_.path};
    options.allow_buffered = options.allow_any_filesystem = true;
    options.host_memory = GetParam().host;
    options.embedding_part = GetParam().part;
    options.commit_every = 1;
    options.speculation = GetParam().speculates ? Speculation::always : Speculation::never;
    return options;
  }
  AdamW adamw() const { return {.weight_decay = GetParam().decay}; }

  // A stage whose gradient no token's row decides.
  static int block_of(const Spoiling& model) {
    const std::vector<StageSpec>& stages = model.spec().stages;
    return static_cast<int>(std::ranges::find(stages, StageKind::block, &StageSpec::kind) - stages.begin());
  }
  void train(Session& session, const Spoiling& model, int up_to, Seen& seen, bool evaluates = true) {
    while (session.steps() < up_to) {
      const int step = static_cast<int>(session.steps());
      seen.losses.resize(std::min<std::size_t>(seen.losses.size(), step));
      seen.norms.resize(std::min<std::size_t>(seen.norms.size(), step));
      auto& spoils = const_cast<Spoiling&>(model);
      spoils.spoiled_stage = GetParam().clips && step == kSpoiledGradient ? block_of(model) : -1;
      spoils.spoiled_loss = step == kSpoiledLoss;
      const StepResult result = session.step(few_tokens(step), 1e-3 * (1 + step));
      seen.losses.push_back(std::isfinite(result.loss) ? result.loss : 0);
      seen.norms.push_back(std::isfinite(result.grad_norm) ? result.grad_norm : 0);
      if (session.options().storage.empty()) {
        EXPECT_EQ(result.embedding_bytes_of_all, 0U);
      } else if (result.clipping == Clipping::staged) {
        EXPECT_GT(result.embedding_rows, 5);
        EXPECT_LT(result.embedding_bytes, result.embedding_bytes_of_all) << "step " << step;
      }
      if (evaluates && step == 6) seen.evaluated = session.evaluate(few_tokens(77)).loss;
    }
  }
  Seen whole(const SessionOptions& options) {
    const auto of = model();
    Session session({of, initial(11)}, options, adamw());
    EXPECT_EQ(session.describe().find("parts that its tokens use") == std::string::npos, options.storage.empty());
    Seen seen;
    train(session, *of, kSteps, seen);
    seen.masters = masters_of(session);
    session.discard();
    return seen;
  }
  // What the weights are after so many steps of a run in memory.
  std::string exported_after(int steps) {
    const auto of = model();
    Session session({of, initial(11)}, in_memory(), adamw());
    Seen ignored;
    train(session, *of, steps, ignored, false);
    session.export_hf(folder_.path / "expected");
    return weights_in("expected");
  }
  std::string weights_in(const char* name) const {
    std::ifstream file(folder_.path / name / "model.safetensors", std::ios::binary);
    EXPECT_TRUE(file.good());
    std::string bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    std::filesystem::remove_all(folder_.path / name);
    return bytes;
  }

  const Folder folder_;
};

TEST_P(Rows, HaveTheBitsOfARunInMemory) {
  const Seen expected = whole(in_memory());
  const Seen seen = whole(on_storage());
  EXPECT_EQ(seen.losses, expected.losses);
  EXPECT_EQ(seen.norms, expected.norms);
  EXPECT_EQ(seen.evaluated, expected.evaluated);
  EXPECT_TRUE(seen.masters == expected.masters);
  SessionOptions commits_never = on_storage();
  commits_never.commit_every = 0;
  commits_never.speculation = Speculation::never;
  EXPECT_TRUE(whole(commits_never) == expected);
}

// The state on storage has missed updates when the run breaks off.
TEST_P(Rows, GoOnWithWhatWasMissed) {
  Seen expected;
  const auto of = model();
  {
    Session session({of, initial(11)}, in_memory(), adamw());
    train(session, *of, kSteps, expected, false);
    expected.masters = masters_of(session);
  }
  Seen seen;
  SessionOptions options = on_storage();
  for (int session_of = 0; session_of < 4; ++session_of) {
    Session session({of, initial(11)}, options, adamw());
    train(session, *of, std::min(kSteps, static_cast<int>(session.steps()) + 3), seen, false);
    options.resume = true;
    options.host_memory = session_of % 2 == 0 ? 4 * kMiB : GetParam().host;
    options.embedding_part.reset();
  }
  // With another optimizer what was missed would be made up for otherwise.
  if (GetParam().part != swap::kChunkQuantum)
    expect_refusal(io::ErrorKind::usage, {"missed updates of an optimizer with other betas"}, [&] {
      AdamW other = adamw();
      other.beta2 = 0.9;
      Session({of, initial(11)}, options, other);
    });
  Session session({of, initial(11)}, options, adamw());
  train(session, *of, kSteps, seen, false);
  EXPECT_EQ(seen.losses, expected.losses);
  EXPECT_EQ(seen.norms, expected.norms);
  EXPECT_TRUE(masters_of(session) == expected.masters);
}

TEST_P(Rows, PayWhereAStepHasFewTokens) {
  const ModelSpec spec = model()->spec();
  SessionOptions options = on_storage();
  EXPECT_EQ(embedding_part_for(spec, options), 0U);  // 12 tokens, 8 times 131072 elements
  options.micro_batches = 1;
  EXPECT_EQ(embedding_part_for(spec, options), swap::kSparseQuantum);
  options.storage.clear();
  EXPECT_EQ(embedding_part_for(spec, options), 0U);
}

TEST_P(Rows, AreExportedUpToDate) {
  const auto of = model();
  Seen ignored;
  SessionOptions options = on_storage();
  std::int64_t after = 0;
  {
    Session session({of, initial(11)}, options, adamw());
    train(session, *of, 3, ignored, false);
  }
  export_store(options.storage, folder_.path / "out");
  options.resume = true;
  {
    Session session({of, initial(11)}, options, adamw());
    after = session.steps();
    ASSERT_GT(after, 0);
    EXPECT_TRUE(weights_in("out") == exported_after(static_cast<int>(after)));
    // A kept step of what was resumed, and one of this run, beside the next.
    for (int more = 0; more < 2; ++more) {
      const int kept_after = static_cast<int>(session.steps());
      const auto kept = session.keep_step();
      ASSERT_NE(kept, nullptr);
      train(session, *of, kept_after + 1, ignored, false);
      kept->wait();
      kept->export_hf(folder_.path / "out", {});
      EXPECT_TRUE(weights_in("out") == exported_after(kept_after));
    }
    session.export_hf(folder_.path / "out");
    EXPECT_TRUE(weights_in("out") == exported_after(static_cast<int>(session.steps())));
    session.discard();
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, Rows,
    ::testing::Values(Setting{.name = "clips"}, Setting{.name = "clips_resident", .host = 14 * kMiB},
                      Setting{.name = "clips_in_large_parts", .part = swap::kChunkQuantum},
                      Setting{.name = "speculates", .speculates = true, .decay = 0.1},
                      Setting{.name = "clips_never", .clips = false, .decay = 0.1},
                      Setting{.name = "defers_a_half", .clips = false, .deferred = 0.5, .tile = 6 << 16},
                      Setting{.name = "rounds_stochastically", .precision = Precision::bf16_sr_adam8},
                      Setting{
                          .name = "tiles", .decay = 0.1, .precision = Precision::fp32_master_adam32, .tile = 6 << 16}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace tierflow::testing

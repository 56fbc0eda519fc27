// The first promise: state on storage under small budgets gives the bits of the run with everything resident.
#include "runtime/session/session.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "optim/adamw.h"
#include "runtime/base/exception.h"
#include "runtime/checkpoint/init.h"
#include "runtime/checkpoint/source_folder.h"
#include "runtime/device/device_memory.h"
#include "swap/arrange.h"
#include "tests/runtime/expect.h"
#include "tests/runtime/session/fixture.h"

namespace tierflow::testing {
namespace {

constexpr int kSteps = 4;

struct Outcome {
  std::vector<double> losses, norms;
  double evaluated = 0;
  std::vector<std::vector<float>> masters;
};

Outcome run(const Case& which, const SessionOptions& options, double spike = 0, const Tiling& tiling = {}) {
  Session session(plain_model(which, tiling), options, {.lr = 3e-3, .weight_decay = 0.1});
  Outcome outcome;
  for (int step = 0; step < kSteps; ++step) {
    const StepResult result = session.step(batches(options.micro_batches, step), 3e-3 + spike);
    outcome.losses.push_back(result.loss);
    outcome.norms.push_back(result.grad_norm);
  }
  outcome.evaluated = session.evaluate(batches(3, 77)).loss;
  if (!options.storage.empty()) {
    const std::uint64_t parameters = session.parameters();
    EXPECT_GT(session.drives().at(0).bytes_read, parameters * 2 * kSteps) << "the run was to stream";
    EXPECT_GT(session.drives().at(0).bytes_written, parameters * 2 * kSteps);
  }
  outcome.masters = masters_of(session);
  return outcome;
}

void expect_same_bits(const Outcome& a, const Outcome& b) {
  EXPECT_EQ(a.losses, b.losses);
  EXPECT_EQ(a.norms, b.norms);
  EXPECT_EQ(a.evaluated, b.evaluated);
  ASSERT_EQ(a.masters.size(), b.masters.size());
  for (std::size_t i = 0; i < a.masters.size(); ++i)
    EXPECT_EQ(std::memcmp(a.masters[i].data(), b.masters[i].data(), 4 * a.masters[i].size()), 0) << "tensor " << i;
}

// The weights after some steps with a part of the tensors frozen, chosen by `seed`; 0: none.
struct Partial {
  std::vector<std::vector<float>> masters;
  std::vector<bool> frozen;
  double first_loss = 0, first_norm = 0;
};

Partial run_partial(const Case& which, SessionOptions options, unsigned seed, int steps) {
  options.clip.reset();  // whose scale would depend on what is frozen
  ModelSpec spec = parse_model_spec(which.json, which.name);
  std::minstd_rand random(seed);
  Partial result;
  for (UnitSpec& unit : spec.units) {
    const bool whole = seed != 0 && random() % 4 == 0;
    for (TensorSpec& tensor : unit.tensors) {
      tensor.trainable = seed == 0 || (!whole && random() % 2 == 0);
      result.frozen.push_back(!tensor.trainable);
    }
  }
  Session session({make_model(std::move(spec)), initial(11)}, options, {.weight_decay = 0.1});
  for (int step = 0; step < steps; ++step) {
    const StepResult done = session.step(batches(options.micro_batches, step), 3e-3);
    if (step == 0) {
      result.first_loss = done.loss;
      result.first_norm = done.grad_norm;
    }
  }
  result.masters = masters_of(session);
  return result;
}

class Bitwise : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override { DeviceMemory::install(); }
};

// What is frozen stays as it was loaded; what is trained has the bits of a step that trains everything.
TEST_P(Bitwise, FrozenTensorsChangeNothingElse) {
  const Folder folder;
  const SessionOptions options = resident(2);
  const Partial before = run_partial(GetParam(), options, 0, 0), all = run_partial(GetParam(), options, 0, 1);
  for (const unsigned seed : {1, 2, 3}) {
    SCOPED_TRACE(seed);
    const Partial part = run_partial(GetParam(), options, seed, 1);
    EXPECT_EQ(part.first_loss, all.first_loss);
    EXPECT_LT(part.first_norm, all.first_norm);
    int frozen = 0, moved = 0;
    for (std::size_t i = 0; i < part.frozen.size(); ++i) {
      if (!part.frozen[i]) {
        EXPECT_EQ(part.masters[i], all.masters[i]) << i;
        moved += part.masters[i] != before.masters[i] ? 1 : 0;
        continue;
      }
      ++frozen;
      for (std::size_t n = 0; n < part.masters[i].size(); ++n)
        ASSERT_EQ(part.masters[i][n], optim::float_from_bf16(optim::bf16_from_float(before.masters[i][n]))) << i;
    }
    EXPECT_GT(frozen, 0);
    EXPECT_GT(moved, 0);
    const Partial later = run_partial(GetParam(), options, seed, kSteps);
    EXPECT_EQ(run_partial(GetParam(), streamed(options, folder), seed, kSteps).masters, later.masters);
  }
}

void expect_streamed_is_resident(const Case& which, const std::vector<std::optional<double>>& clips,
                                 const Tiling& tiling) {
  const Folder folder;
  for (const std::optional<double> clip : clips) {
    SessionOptions options = resident(2);
    options.clip = clip;
    const Outcome expected = run(which, options, 0, tiling);
    EXPECT_LT(expected.losses.back(), expected.losses.front() + 0.5);
    for (const double loss : expected.losses) EXPECT_TRUE(std::isfinite(loss));
    const SessionOptions again = least_device(options, which, tiling);
    const std::string keeps = "keep their activations";
    EXPECT_EQ(described(which, again, tiling).find(keeps), std::string::npos);
    EXPECT_EQ(described(which, options, tiling).find(keeps) != std::string::npos, can_keep(which, tiling));
    expect_same_bits(run(which, again, 0, tiling), expected);
    SessionOptions small = streamed(options, folder);
    expect_same_bits(run(which, small, 0, tiling), expected);
    small.chaos_seed = 7;
    small.engine = io::EngineKind::threads;
    expect_same_bits(run(which, small, 0, tiling), expected);
    if (can_keep(which, tiling)) expect_same_bits(run(which, swapping(small, which, tiling), 0, tiling), expected);
  }
}

TEST_P(Bitwise, StreamedIsResident) {
  expect_streamed_is_resident(GetParam(), {0.05, std::nullopt}, {});
}

// Half of the families with each.
TEST_P(Bitwise, StreamedIsResidentInTiles) {
  const bool clips = GetParam().name.size() % 2 == 0;
  expect_streamed_is_resident(GetParam(), {clips ? std::optional<double>(0.05) : std::nullopt}, kTiled);
}

INSTANTIATE_TEST_SUITE_P(Models, Bitwise, ::testing::ValuesIn(cases_with_balance("0.1")), case_name);

TEST(Session, EveryPrecisionIsTheSameBitsStreamed) {
  DeviceMemory::install();
  const Folder folder;
  const Case llama = cases().front();
  for (const Precision precision : {Precision::fp32_master_adam32, Precision::bf16_sr_adam8}) {
    SessionOptions options = resident(1);
    options.precision = precision;
    expect_same_bits(run(llama, streamed(options, folder)), run(llama, options));
  }
}

TEST(Session, ADifferenceShows) {  // negative control of the comparison
  DeviceMemory::install();
  const Case llama = cases().front();
  EXPECT_NE(run(llama, resident(1)).masters, run(llama, resident(1), 1e-5).masters);
}

TEST(Session, LearnsARepeatedBatch) {
  DeviceMemory::install();
  Session session({make_model(parse_model_spec(cases().front().json, "llama")), initial(1)}, resident(1));
  const auto batch = batches(1, 0);
  const double first = session.step(batch, 1e-2).loss;
  double last = first;
  for (int i = 0; i < 60; ++i) last = session.step(batch, 1e-2).loss;
  EXPECT_LT(last, 0.3 * first);
}

TEST(Session, WhatItRefusesLeavesItAsItWas) {
  DeviceMemory::install();
  const Folder folder;
  const Model model{make_model(parse_model_spec(cases().front().json, "llama")), initial(1)};
  const auto steps = [&](const std::function<void(Session&)>& between) {
    Session session(model, streamed(resident(2), folder));
    std::vector<double> seen;
    for (int step = 0; step < 3; ++step) {
      seen.push_back(session.step(batches(2, step)).loss);
      between(session);
    }
    seen.push_back(session.evaluate(batches(3, 7)).loss);
    return seen;
  };
  const auto expected = steps([](Session&) {});
  const auto refused = [](const auto& call, std::string_view words) {
    expect_refusal(io::ErrorKind::usage, {words}, call);
  };
  EXPECT_EQ(steps([&](Session& session) {
              auto beyond = batches(2, 5), wide = batches(2, 5);
              beyond[1].ids.add_(1000);
              wide[0].ids = wide[0].ids.repeat({2, 1});
              wide[0].labels = wide[0].labels.repeat({2, 1});
              refused([&] { session.step(beyond); }, "micro-batch 1: id");
              refused([&] { session.step(wide); }, "at most 2 x 16 tokens");
              for (const auto& change : std::vector<std::function<void(MicroBatch&)>>{
                       [](MicroBatch& b) { b.ids = b.ids[0]; }, [](MicroBatch& b) { b.labels = b.labels[0]; },
                       [](MicroBatch& b) { b.ids.reset(); }, [](MicroBatch& b) { b.labels.reset(); }}) {
                auto other = batches(2, 5);
                change(other[1]);
                refused([&] { session.step(other); }, "micro-batch 1 is not what the session takes");
                refused([&] { session.evaluate(other); }, "micro-batch 1 is not what the session takes");
              }
              for (const int dimension : {0, 1}) {
                auto empty = batches(2, 5);
                empty[1].ids = empty[1].ids.narrow(dimension, 0, 0);
                empty[1].labels = empty[1].labels.narrow(dimension, 0, 0);
                refused([&] { session.step(empty); }, "micro-batch 1 has no tokens");
                refused([&] { session.evaluate(empty); }, "micro-batch 1 has no tokens");
              }
              auto untaught = batches(2, 5);
              untaught[0].teacher_ids = torch::zeros({2, 16, 3}, torch::kInt);
              refused([&] { session.evaluate(untaught); }, "micro-batch 0 has a teacher's tokens");
              refused([&] { session.step(batches(1, 5)); }, "a step takes 2 micro-batches");
              refused([&] { session.evaluate(beyond); }, "micro-batch 1: id");
              refused([&] { session.evaluate(std::vector<MicroBatch>{}); }, "no micro-batches");
              const int after = session.plan().evaluated_at_once;  // one pass of good ones
              const auto make = [&](std::int64_t index) { return index < after ? batches(1, 5)[0] : beyond[1]; };
              refused([&] { session.evaluate(after + 2, make); }, "micro-batch " + std::to_string(after) + ": id");
              EXPECT_THROW(session.evaluate(2, [](std::int64_t) -> MicroBatch { throw std::bad_alloc(); }),
                           std::bad_alloc);
              refused([&] { session.begin_with_gradient(batches(2, 5)); }, "wait for no gradient");
            }),
            expected);
}

TEST(Session, RefusesOptionsThatCannotTrain) {
  DeviceMemory::install();
  const Model model{make_model(parse_model_spec(cases().front().json, "llama")), initial(1)};
  const auto refused = [&](std::string_view words, const SessionOptions& options, const AdamW& adamw = {}) {
    expect_refusal(io::ErrorKind::usage, {words}, [&] { const Session session(model, options, adamw); });
  };
  for (const double clip : {-1.0, 0.0, static_cast<double>(NAN)}) {
    SessionOptions options = resident(1);
    options.clip = clip;
    refused("clip is a number above 0, or none", options);
  }
  SessionOptions longer = resident(1);
  longer.micro_batch = 1;
  longer.sequence_length = 64;
  const Session fits(model, longer);
  longer.sequence_length = 65;
  refused("sequence_length 65 exceeds the model's 64 positions", longer);
  longer.train = false;
  refused("sequence_length 65 exceeds the model's 64 positions", longer);
  SessionOptions none = resident(1);
  none.micro_batches = 0;
  refused("micro_batch, micro_batches and sequence_length are at least 1", none);
  SessionOptions elsewhere = resident(1);
  elsewhere.device = "tpu";
  refused("device is cpu or cuda", elsewhere);
  refused("betas are at least 0", resident(1), {.beta1 = 1});
  for (const double lr : {-1.0, static_cast<double>(NAN), static_cast<double>(INFINITY)})
    refused("lr, eps and weight_decay are numbers", resident(1), {.lr = lr});
  refused("eps and weight_decay are numbers", resident(1), {.weight_decay = -1});
  SessionOptions wrong = resident(1);
  wrong.commit_every = -3;
  refused("commit_every is a number of steps", wrong);
  wrong.commit_every = 1;
  refused("none is named", wrong);
  wrong = resident(1);
  wrong.keep_store = true;
  refused("none is named", wrong);
  for (const double share : {-1.0, 7.0}) {
    wrong = resident(1);
    wrong.deferred_share = share;
    refused("are from 0 to 1", wrong);
  }
  wrong = resident(1);
  wrong.run = "hello";
  refused("run is a JSON object, not hello", wrong);
}

TEST(Session, RefusesBudgetsThatCannotWorkAndNamesTheSmallest) {
  DeviceMemory::install();
  const auto attempt = [](const SessionOptions& options) {
    try {
      Session session({make_model(parse_model_spec(cases().front().json, "llama")), initial(1)}, options);
      return std::string();
    } catch (const Exception& error) {
      EXPECT_EQ(error.error().kind, io::ErrorKind::usage);
      return std::string(error.what());
    }
  };
  SessionOptions options = resident(1);
  options.device_memory = kMiB;
  EXPECT_NE(attempt(options).find("--device-memory 1024KiB is too small: the smallest that works is"),
            std::string::npos)
      << attempt(options);
  options = resident(1);
  options.host_memory = 4 * 1024;
  const std::string refusal = attempt(options);
  const std::string before = "the smallest that works is ";
  ASSERT_NE(refusal.find("--host-memory 4KiB is too small: " + before), std::string::npos) << refusal;
  options.host_memory = std::stoull(refusal.substr(refusal.find(before) + before.size())) * 1024;
  EXPECT_EQ(attempt(options), "");
}

TEST(Session, ANonFiniteGradientSkipsTheStepWhole) {
  DeviceMemory::install();
  const Case llama = cases().front();
  SessionOptions options = resident(1);
  const auto spoiled = [](const TensorSpec& tensor, std::uint64_t first, std::span<float> out) {
    initial(11)(tensor, first, out);
    if (tensor.role.find("down_proj") != std::string::npos && first == 0) out[0] = INFINITY;
  };
  for (const std::optional<double> clip : {std::optional<double>(1.0), std::optional<double>()}) {
    options.clip = clip;
    Session session({make_model(parse_model_spec(llama.json, "llama")), spoiled}, options);
    const auto before = session.master(1, 0);
    const StepResult result = session.step(batches(1, 0), 1e-2);
    EXPECT_TRUE(result.skipped);
    EXPECT_EQ(session.skipped_steps(), 1U);
    EXPECT_EQ(session.master(1, 0), before);
  }
}

// What a pass fetches serves as many micro-batches as the budgets hold; how many these are changes no bit.
TEST(Session, EvaluatesAsManyMicroBatchesInAPassAsTheBudgetsHold) {
  const Case which = cases().front();
  const Folder folder;
  const auto model = [&] { return plain_model(which); };
  SessionOptions options = streamed(resident(8), folder);
  options.train = false;
  options.device_memory = kMiB / 2;
  try {
    const Session too_small(model(), options);
    FAIL() << "the budget was to be too small";
  } catch (const Exception& error) {
    const std::string said = error.what(), before = "the smallest that works is ";
    ASSERT_NE(said.find(before), std::string::npos) << said;
    options.device_memory = std::stoull(said.substr(said.find(before) + before.size())) * 1024;
  }
  options.fewer_micro_batches = true;
  std::vector<Evaluation> found;
  std::vector<std::uint64_t> uploaded;
  std::vector<int> at_once;
  for (const int wanted : {1, 8, 64}) {
    options.micro_batches = wanted;
    Session session(model(), options);
    const std::vector<MicroBatch> all = batches(8, 77);
    std::vector<std::int64_t> order;
    std::uint64_t visits = 0;
    found.push_back(session.evaluate(
        8, [&](std::int64_t index) { return all[static_cast<std::size_t>(index)]; },
        [&](std::int64_t index, const MicroBatch& batch, const HeadScores& scores) {
          order.push_back(index);
          EXPECT_TRUE(torch::equal(batch.labels, all[static_cast<std::size_t>(index)].labels));
          EXPECT_EQ(scores.losses.numel(), 32);
          EXPECT_EQ(scores.hits.numel(), 32);
        },
        [&](const char*, std::uint64_t done, std::uint64_t total) {
          EXPECT_EQ(done, visits++);
          EXPECT_EQ(total, 8 * session.plan().layout->stages().size());
        }));
    EXPECT_EQ(visits, 8 * session.plan().layout->stages().size());
    EXPECT_EQ(order, (std::vector<std::int64_t>{0, 1, 2, 3, 4, 5, 6, 7}));
    uploaded.push_back(session.lanes()[static_cast<std::size_t>(swap::Lane::upload)].bytes);
    at_once.push_back(session.options().micro_batches);
  }
  EXPECT_EQ(at_once, (std::vector<int>{1, 8, 8}));
  EXPECT_GT(uploaded[0], 4 * uploaded[1]);
  for (const Evaluation& each : found) {
    EXPECT_EQ(each.loss, found[0].loss);
    EXPECT_EQ(each.accuracy, found[0].accuracy);
    EXPECT_EQ(each.tokens, 8 * 32);
  }
}

// Between steps that take one micro-batch, an evaluation uses the memory that those set aside for their backward.
TEST(Session, EvaluatesMoreMicroBatchesInAPassThanAStepHas) {
  const Case which = cases().front();
  const Folder folder;
  const auto model = [&] { return plain_model(which); };
  Session all(model(), resident(1));
  SessionOptions options = least_device(streamed(resident(1), folder), which, {});
  options.device_memory += 256 * 1024;
  Session session(model(), options);
  const int at_once = session.plan().evaluated_at_once;
  ASSERT_GE(at_once, 8) << session.describe();
  ASSERT_LE(at_once, 32);
  std::vector<std::uint64_t> read;
  for (const int count : {1, at_once, 4 * at_once}) {
    EXPECT_EQ(session.step(batches(1, 3), 1e-3).loss, all.step(batches(1, 3), 1e-3).loss);
    const std::uint64_t before = session.drives().at(0).bytes_read;
    EXPECT_EQ(session.evaluate(batches(count, 77)).loss, all.evaluate(batches(count, 77)).loss);
    read.push_back(session.drives().at(0).bytes_read - before);
  }
  EXPECT_GT(read[0], 0U);
  EXPECT_EQ(read[1], read[0]);
  EXPECT_LE(read[2], 4 * read[0]);
  EXPECT_LE(session.memory().device_peak, options.device_memory);
}

void expect_export_is_read_back(const Tiling& tiling, const Tiling& read_with, const Case& which = cases().front(),
                                const TrainableConfig& part = {}) {
  const Folder folder;
  std::filesystem::create_directories(folder.path);
  double trained = 0;
  {
    Session session(with_trainable({make_model(parse_model_spec(which.json, which.name, tiling)), initial(2)}, part),
                    resident(1));
    session.step(batches(1, 0), 1e-2);
    trained = session.evaluate(batches(2, 5)).loss;
    session.export_hf(folder.path / "out");
  }
  const Checkpoint checkpoint = Checkpoint::open(folder.path / "out");
  const ModelSpec spec = read_model_spec(folder.path / "out" / "config.json", read_with);
  check_tensors(spec, checkpoint);
  SessionOptions options = resident(2);
  options.train = false;
  Session session({make_model(spec), [&](const TensorSpec& tensor, std::uint64_t first,
                                         std::span<float> out) { checkpoint.read_f32(tensor, first, out); }},
                  options);
  if (tiling.block_elements == read_with.block_elements)
    EXPECT_EQ(session.evaluate(batches(2, 5)).loss, trained);
  else
    EXPECT_NEAR(session.evaluate(batches(2, 5)).loss, trained, 1e-4 * trained);
}

TEST(Session, ExportIsReadBackAndEvaluatesTheSame) {
  DeviceMemory::install();
  expect_export_is_read_back({}, {});
  expect_export_is_read_back(kTiled, kTiled);
  expect_export_is_read_back(kTiled, {});
  expect_export_is_read_back({}, kTiled);
  // The last tile of a table shares its unit with the positions, of which one may be frozen alone.
  for (const Case& which : cases())
    if (which.name.starts_with("gpt2") || which.name.starts_with("opt"))
      for (const TrainableConfig& part :
           {TrainableConfig{.freeze = {"wte|embed_tokens"}}, TrainableConfig{.trainable = {"wpe|embed_positions"}},
            TrainableConfig{.freeze = {"wpe|embed_positions"}}}) {
        SCOPED_TRACE(which.name);
        expect_export_is_read_back(kTiled, kTiled, which, part);
      }
}

// Tensors of a model folder by name.
std::map<std::string, std::vector<float>> tensors_of(const std::filesystem::path& folder) {
  const Checkpoint checkpoint = Checkpoint::open(folder);
  std::map<std::string, std::vector<float>> tensors;
  for (const auto& [name, entry] : checkpoint.tensors()) {
    auto& values = tensors[name];
    values.resize(entry.bytes / dtype_size(entry.dtype));
    checkpoint.read_f32(name, 0, values);
  }
  return tensors;
}

TEST(Session, TilesDoNotShowInExportOrMaster) {
  DeviceMemory::install();
  const Folder folder;
  std::filesystem::create_directories(folder.path);
  for (const Case& which : cases()) {
    std::vector<std::map<std::string, std::vector<float>>> exported, masters;
    for (const Tiling& tiling : {Tiling{}, kTiled}) {
      SessionOptions options = streamed(resident(1), folder);
      options.storage = {folder.path / "store"};
      options.keep_store = true;
      const ModelSpec spec = parse_model_spec(which.json, which.name, tiling);
      {
        Session session({make_model(spec), initial(2)}, options);
        session.export_hf(folder.path / "direct");
        masters.emplace_back();
        for (const UnitSpec& unit : spec.units)
          for (const TensorSpec& tensor : unit.tensors) masters.back()[tensor.name] = session.master(tensor.name);
        EXPECT_THROW(session.master("nobody"), Exception);
        session.commit();
      }
      export_store(options.storage, folder.path / "kept");
      exported.push_back(tensors_of(folder.path / "direct"));
      EXPECT_EQ(tensors_of(folder.path / "kept"), exported.back());
      for (const char* used : {"store", "direct", "kept"}) std::filesystem::remove_all(folder.path / used);
    }
    EXPECT_EQ(exported[0], exported[1]) << which.name;
    EXPECT_EQ(masters[0], masters[1]) << which.name;
  }
}

// Beside the bf16 gradient of one matrix there is room for a slice of it in fp32, not for all of it.
TEST(LayeredModel, BackwardWidensGradientsInSlices) {
  DeviceMemory& memory = DeviceMemory::install();
  memory.set_cap(1024 * kMiB);
  const auto model = make_model(parse_model_spec(R"({"architectures": ["OPTForCausalLM"], "vocab_size": 16,
      "hidden_size": 2048, "ffn_dim": 8192, "num_hidden_layers": 1, "num_attention_heads": 16,
      "max_position_embeddings": 64, "word_embed_proj_dim": 2048})",
                                                 "opt"));
  Weights weights;
  Gradients gradients;
  for (const TensorSpec& tensor : model->spec().units[1].tensors) {
    weights.push_back(torch::zeros(tensor.shape, torch::kBFloat16));
    gradients.push_back(torch::zeros(tensor.shape));
  }
  const auto tokens = torch::zeros({1, 16}, torch::kLong);
  const Carry hidden{torch::zeros({1, 16, 2048}, torch::kBFloat16)};
  memory.release_kept();
  memory.reset_peak();
  const std::uint64_t before = memory.stats().used;
  model->backward(1, weights, gradients, hidden, model->share({.ids = tokens, .labels = tokens}, torch::kCPU), hidden);
  EXPECT_LT(memory.stats().peak_used - before, 2 * 2048 * 8192 * 2) << "twice the largest bf16 gradient";
}

// What makes the large models fit: with the defaults, no unit dictates the device budget.
TEST(Tiling, BudgetsOfLargeModels) {
  constexpr std::uint64_t kGiB = 1024 * kMiB;
  struct Large {
    const char *name, *json;
    std::uint64_t host, device, workspace;
  };
  const Large models[] = {
      {"Qwen2.5-7B", R"({"architectures": ["Qwen2ForCausalLM"], "vocab_size": 152064, "hidden_size": 3584,
          "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4})",
       6 * kGiB, 3 * kGiB, kGiB / 2},
      {"GPT-3 175B", R"({"architectures": ["OPTForCausalLM"], "vocab_size": 50272, "hidden_size": 12288,
          "ffn_dim": 49152, "num_hidden_layers": 96, "num_attention_heads": 96, "word_embed_proj_dim": 12288})",
       4 * kGiB, 12 * kGiB, kGiB},
  };
  for (const Large& large : models)
    for (const bool tiled : {true, false}) {
      const ModelSpec spec = parse_model_spec(large.json, large.name, tiled ? Tiling{} : Tiling::none());
      const PackedModel packed = pack(spec, Precision::fp32_master_adam8);
      std::vector<swap::UnitShape> units;
      for (const PackedUnit& unit : packed.units) units.push_back(unit.shape);
      const swap::Layout layout(std::move(units), packed.stages, chunk_elements_for(large.host));
      const auto arrangement = swap::arrange(
          layout, {.host_budget = large.host, .device_budget = large.device, .workspace = large.workspace});
      EXPECT_EQ(arrangement.ok(), tiled) << large.name;
    }
}

}  // namespace
}  // namespace tierflow::testing

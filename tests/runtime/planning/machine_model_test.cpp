// Machines that are not there: what their rates come to, by hand.
#include "runtime/planning/machine_model.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "runtime/planning/prediction.h"
#include "runtime/planning/probed_model.h"
#include "runtime/planning/stage_cost.h"
#include "runtime/spec/stage_class.h"
#include "tests/runtime/expect.h"
#include "tests/support/temp_dir.h"

namespace tierflow::testing {
namespace {

constexpr double kHidden = 64, kWidth = 192, kKv = 32, kVocabulary = 512, kLayers = 6, kTokens = 2 * 128;
// Weights of a block that a token is multiplied with.
constexpr double kBlock = 2 * kHidden * kHidden + 2 * kHidden * kKv + 3 * kHidden * kWidth;

ModelSpec small() {
  return parse_model_spec(
      R"({"architectures":["LlamaForCausalLM"],"vocab_size":512,"hidden_size":64,"intermediate_size":192,)"
      R"("num_attention_heads":4,"num_key_value_heads":2,"num_hidden_layers":6})",
      "config.json");
}

constexpr double kAtOnce = 1e18;  // a second: no work takes time

MachineModel at_once() {
  const Figure fast{kAtOnce, "made up"}, none{0, "made up"};
  return {.name = "made-up",
          .card = {.products = fast,
                   .attention = fast,
                   .memory_rate = fast,
                   .memory = {1 << 30, ""},
                   .upload = fast,
                   .download = fast,
                   .launch = none,
                   .context = none},
          .host = {.memory_rate = fast,
                   .memory = {1 << 30, ""},
                   .cores = {8, ""},
                   .update = fast,
                   .measure = fast,
                   .checksum = fast},
          .drive = {.read = fast, .write = fast},
          .drives = 1};
}

SessionOptions options_of(const MachineModel& machine) {
  return {.device = "cuda",
          .device_memory = device_budget(machine),
          .host_memory = host_budget(machine),
          .storage = {"nvme0"},
          .clip = std::nullopt,
          .micro_batch = 2,
          .micro_batches = 1,
          .sequence_length = 128};
}

Profile profile_on(const MachineModel& machine, const SessionOptions& options) {
  return {machine_profile(machine), model_profile(small(), options, machine)};
}

Prediction predicted(const MachineModel& machine, const SessionOptions& options) {
  const ModelSpec spec = small();
  const Profile profile = profile_on(machine, options);
  return predict(plan_session(spec, options, profile.model.needs(spec)), rates_of(spec, profile));
}

double bytes(const Prediction& prediction, swap::Lane lane) {
  return static_cast<double>(prediction.bytes[static_cast<std::size_t>(lane)]);
}

TEST(MachineModel, KnowsWhatItsNameSays) {
  const MachineModel two = find_machine("rtx4090-128gb-2nvme");
  EXPECT_EQ(two.host.memory.value, 128.0 * (1 << 30));
  EXPECT_EQ(two.drives, 2);
  EXPECT_EQ(machine_profile(two).rates.disk_read, 2 * two.drive.read.value);
  EXPECT_EQ(machine_profile(two).rates.disk_write, 2 * two.drive.write.value);
  EXPECT_EQ(find_machine("h200-2048gb").drives, 0);
  EXPECT_NE(find_machine("rtx5090-192gb-4nvme5").drive.read.value, two.drive.read.value);
  EXPECT_LT(device_budget(two), static_cast<std::uint64_t>(two.card.memory.value));
  for (const char* name :
       {"rtx3090-64gb", "rtx4090-128gb-2nvme", "rtx5090-192gb-4nvme5", "h100-512gb", "h200-1024gb-8nvme"})
    for (const auto& [figure, of] : find_machine(name).figures()) {
      EXPECT_GT(of.value, 0) << name << " " << figure;
      EXPECT_FALSE(of.source.empty()) << name << " " << figure;
    }
}

TEST(MachineModel, SaysInOneLineWhichThereAre) {
  for (const char* name : {"", "rtx4090", "rtx4091-128gb", "rtx4090-gb", "rtx4090-0gb", "rtx4090-128", "rtx4090-128gb-",
                           "rtx4090-128gb-2", "rtx4090-128gb-2nvme7", "rtx4090-128gb-2nvme-1", "rtx4090-128gb-99nvme",
                           "rtx4090-99999999999gb", "rtx4090--2nvme", "a\nb"})
    try {
      find_machine(name);
      ADD_FAILURE() << name;
    } catch (const Exception& error) {
      EXPECT_EQ(error.error().kind, io::ErrorKind::usage);
      const std::string what = error.what();
      EXPECT_EQ(what.find('\n'), std::string::npos) << what;
      EXPECT_NE(what.find("h100, h200, rtx3090, rtx4090, rtx5090"), std::string::npos) << what;
    }
}

// An update of 8-bit moments reads 8 bytes of words and state and 2 of gradient, and writes 6, and 8 more in 256.
TEST(MachineModel, UpdatesAtTheRateOfMemoryOrOfTheCores) {
  MachineModel machine = at_once();
  const std::string adam8 = state_formats(Precision::fp32_master_adam8)[0].second;
  machine.host.memory_rate.value = 1000;
  EXPECT_NEAR(machine_profile(machine).update.at(adam8), 1000 / (14 + 16.0 / 256), 1e-9);
  machine.host.update.value = 3;
  EXPECT_NEAR(machine_profile(machine).update.at(adam8), 8 * 3, 1e-9);
  machine.card.memory_rate.value = 2000;
  EXPECT_NEAR(machine_profile(machine).device_update.at(adam8), 2000 / (20 + 16.0 / 256), 1e-9);
}

// Of a block: each weight takes two operations a token forward and four backward, attention two of each key and number
// of a query, and half as many again as twice that backward.
TEST(MachineModel, StagesTakeTheirOperationsAndBytesByTheRates) {
  const ModelSpec spec = small();
  MachineModel machine = at_once();
  const SessionOptions options = options_of(machine);
  const auto block = [&] { return model_profile(spec, options, machine).stages.at(stage_class(spec, 2)).seconds; };
  machine.card.products.value = 1e6;
  EXPECT_NEAR(block().forward, 2 * kTokens * kBlock / 1e6, 1e-6);
  EXPECT_NEAR(block().backward_kept, 4 * kTokens * kBlock / 1e6, 1e-6);
  // The forward's last product, of the MLP, is not needed again.
  EXPECT_NEAR(block().backward, kTokens * (6 * kBlock - 2 * kHidden * kWidth) / 1e6, 1e-6);
  EXPECT_NEAR(model_profile(spec, options, machine).stages.at(stage_class(spec, kLayers + 1)).seconds.head,
              6 * kTokens * kVocabulary * kHidden / 1e6, 1e-6);
  machine = at_once();
  machine.card.attention.value = 1e6;
  EXPECT_NEAR(block().forward, 2 * kTokens * 128 * kHidden / 1e6, 1e-6);
  EXPECT_NEAR(block().backward_kept, 5 * kTokens * 128 * kHidden / 1e6, 1e-6);
  EXPECT_NEAR(block().backward, 7 * kTokens * 128 * kHidden / 1e6, 1e-6);
  machine = at_once();
  machine.card.memory_rate.value = 1e6;
  const StageCost cost = stage_cost(spec, 2, 2, 128);
  EXPECT_GT(cost.forward_bytes, 0);
  EXPECT_NEAR(block().forward, cost.forward_bytes / 1e6, 1e-6);
  EXPECT_NEAR(block().forward_swapping, (cost.forward_bytes + 2.0 * static_cast<double>(cost.swapped_bytes)) / 1e6,
              1e-6);
  // Starting kernels is the limit of small stages; it is not added to what they take.
  machine = at_once();
  machine.card.launch.value = 1;
  EXPECT_EQ(block().forward, cost.forward_launches);
  machine.card.memory_rate.value = 1;
  EXPECT_EQ(block().forward, cost.forward_bytes);
}

// Experts are started one by one: those that tokens choose, forward and, with what it computes again, backward.
TEST(MachineModel, EachExpertIsStarted) {
  const ModelSpec spec = parse_model_spec(
      R"({"architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 96, "hidden_size": 32, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24, "moe_intermediate_size": 16,
    "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 1})",
      "model");
  const auto stage = std::ranges::find_if(
      spec.stages, [](const StageSpec& of) { return of.kind == StageKind::mlp || of.kind == StageKind::experts; });
  ASSERT_NE(stage, spec.stages.end());
  const int number = static_cast<int>(stage - spec.stages.begin());
  const StageCost all = stage_cost(spec, number, 2, 64), one = stage_cost(spec, number, 1, 1);
  EXPECT_EQ(all.forward_launches - one.forward_launches, 9 * (8 - 2));
  EXPECT_EQ(all.backward_launches - one.backward_launches, 23 * (8 - 2));
  EXPECT_EQ(stage_cost(spec, number - 1, 2, 64).forward_launches, 7);
}

// A row of four chunks costs what four rows of one do; in a layer that sees all, attention costs four times as much.
TEST(MachineModel, AttentionInChunksCostsTheChunks) {
  const ModelSpec spec = parse_model_spec(
      R"({"architectures": ["Llama4ForCausalLM"], "vocab_size": 96, "hidden_size": 32, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24, "num_hidden_layers": 2,
    "attention_chunk_size": 64, "no_rope_layer_interval": 2})",
      "model");
  ASSERT_EQ(spec.stages.at(1).kind, StageKind::attention);
  ASSERT_EQ(spec.stages.at(3).kind, StageKind::attention);
  const double apart = stage_cost(spec, 1, 4, 64).attention;
  EXPECT_GT(apart, 0);
  EXPECT_EQ(stage_cost(spec, 1, 1, 256).attention, apart);
  EXPECT_EQ(stage_cost(spec, 3, 4, 64).attention, apart);
  EXPECT_EQ(stage_cost(spec, 3, 1, 256).attention, 4 * apart);
  EXPECT_EQ(stage_operations(spec, 1, 1, 256), stage_operations(spec, 1, 4, 64));
  EXPECT_GT(stage_operations(spec, 3, 1, 256), stage_operations(spec, 3, 4, 64));
}

TEST(MachineModel, FrozenWeightsTakeNoProductForTheirGradient) {
  ModelSpec spec = small();
  const double trained = stage_cost(spec, 2, 2, 128).backward_products;
  for (TensorSpec& tensor : spec.units[2].tensors) tensor.trainable = false;
  EXPECT_EQ(stage_cost(spec, 2, 2, 128).backward_products, trained / 2);
}

// With everything on the device a step is its products, six operations a weight and token.
TEST(MachineModel, StepLimitedByCompute) {
  MachineModel machine = at_once();
  machine.card.products.value = 1e6;
  SessionOptions options = options_of(machine);
  const double expected = 6 * kTokens * (kLayers * kBlock + kVocabulary * kHidden) / 1e6;
  EXPECT_NEAR(predicted(machine, options).step_seconds, expected, 1e-6 * expected);
  options.micro_batches = 3;
  EXPECT_NEAR(predicted(machine, options).step_seconds, 3 * expected, 1e-6 * expected);
}

// What the CPU updated comes to the device once a step, two bytes a weight; units end at whole sectors.
TEST(MachineModel, StepLimitedByTheLink) {
  const double expected = 2.0 * static_cast<double>(small().parameters()) / 1e6;
  for (Figure CardModel::*link : {&CardModel::upload, &CardModel::download}) {  // weights; gradients, of bf16
    MachineModel machine = at_once();
    (machine.card.*link).value = 1e6;
    SessionOptions options = options_of(machine);
    options.uses_spare_device_memory = false;  // it updates all of them
    const double step = predicted(machine, options).step_seconds;
    EXPECT_GE(step, expected);
    EXPECT_LE(step, 1.05 * expected);
  }
}

// Little is resident: drives read words and state and write them, one after the other.
TEST(MachineModel, StepLimitedByTheDrive) {
  MachineModel machine = at_once();
  machine.drive.read.value = 2e6;
  machine.drive.write.value = 1e6;
  machine.drives = 2;
  SessionOptions options = options_of(machine);
  options.host_memory = 3 << 19;
  options.uses_spare_device_memory = false;  // no state stays on the card
  const Prediction prediction = predicted(machine, options);
  const double read = bytes(prediction, swap::Lane::disk_read), written = bytes(prediction, swap::Lane::disk_write),
               expected = read / 4e6 + written / 2e6;
  ASSERT_GT(written, 2.0 * static_cast<double>(small().parameters()));
  EXPECT_NEAR(prediction.step_seconds, expected, 0.02 * expected);
}

// Reads, copies and updates all move bytes in the host's memory: together no more than that gives.
TEST(MachineModel, StepLimitedByHostMemory) {
  MachineModel machine = at_once();
  machine.host.memory_rate.value = 1e6;
  SessionOptions options = options_of(machine);
  options.uses_spare_device_memory = false;  // the host updates all of them
  const Prediction prediction = predicted(machine, options);
  const double weights = static_cast<double>(small().parameters());
  const double least = bytes(prediction, swap::Lane::upload) + bytes(prediction, swap::Lane::download) + 14 * weights;
  EXPECT_GE(prediction.step_seconds, 0.999 * least / 1e6);
  EXPECT_LE(prediction.step_seconds, 1.6 * least / 1e6);  // embeddings and norms move more than 14
}

TEST(MachineModel, AFasterPartMakesNoStepLonger) {
  const MachineModel machine = find_machine("rtx4090-128gb-2nvme");
  SessionOptions options = options_of(machine);
  options.host_memory = 6 << 20;
  options.device_memory = 32 << 20;
  options.device_memory += static_cast<std::uint64_t>(machine.card.context.value);
  const double before = predicted(machine, options).step_seconds;
  int shorter = 0;
  const auto try_faster = [&](const char* what, auto member) {
    MachineModel faster = machine;
    member(faster).value *= 4;
    const double after = predicted(faster, options).step_seconds;
    EXPECT_LE(after, before * (1 + 1e-9)) << what;
    if (after < before * 0.999) ++shorter;
  };
  try_faster("products", [](MachineModel& m) -> Figure& { return m.card.products; });
  try_faster("attention", [](MachineModel& m) -> Figure& { return m.card.attention; });
  try_faster("card memory", [](MachineModel& m) -> Figure& { return m.card.memory_rate; });
  try_faster("upload", [](MachineModel& m) -> Figure& { return m.card.upload; });
  try_faster("download", [](MachineModel& m) -> Figure& { return m.card.download; });
  try_faster("host memory", [](MachineModel& m) -> Figure& { return m.host.memory_rate; });
  try_faster("cores", [](MachineModel& m) -> Figure& { return m.host.cores; });
  try_faster("update", [](MachineModel& m) -> Figure& { return m.host.update; });
  try_faster("checksum", [](MachineModel& m) -> Figure& { return m.host.checksum; });
  try_faster("read", [](MachineModel& m) -> Figure& { return m.drive.read; });
  try_faster("write", [](MachineModel& m) -> Figure& { return m.drive.write; });
  EXPECT_GE(shorter, 1);
}

// A plan cannot tell such a profile from a measured one: kept and read again, it gives the same plan and the same step.
TEST(MachineModel, PlansAsAMeasuredProfileWithItsRatesDoes) {
  const TempDir folder;
  ASSERT_EQ(setenv("XDG_CACHE_HOME", folder.path().c_str(), 1), 0);
  const ModelSpec spec = small();
  const MachineModel machine = find_machine("rtx4090-128gb-2nvme");
  SessionOptions options = options_of(machine);
  options.host_memory = 6 << 20;
  const Profile computed = profile_on(machine, options);
  const ProfileCache cache(spec, options, "build", [](const std::string& line) { ADD_FAILURE() << line; });
  cache.keep(computed.machine);
  cache.keep(computed.model);
  ASSERT_TRUE(cache.machine() && cache.model());
  SessionOptions other = options;
  const Placement a = choose_placement(spec, options, computed),
                  b = choose_placement(spec, other, {*cache.machine(), *cache.model()});
  EXPECT_EQ(a.plan.arrangement, b.plan.arrangement);
  EXPECT_EQ(a.prediction.step_seconds, b.prediction.step_seconds);
  EXPECT_EQ(a.prediction.bytes, b.prediction.bytes);
}

}  // namespace
}  // namespace tierflow::testing

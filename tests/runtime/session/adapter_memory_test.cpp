// What writing a model takes beside its budgets, and that it is the model of the last step.
#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <mutex>

#include "runtime/base/files.h"
#include "runtime/device/device_memory.h"
#include "tests/runtime/expect.h"
#include "tests/runtime/session/fixture.h"
#include "tests/support/counted_heap.h"

namespace tierflow::testing {
namespace {

constexpr const char* kWideVocabulary =
    R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 131072, "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": false, "hidden_act": "silu"})";

// Bytes that `work` takes at most, of the heap and of torch's memory.
std::int64_t most_of(const std::function<void()>& work) {
  DeviceMemory& torch_memory = DeviceMemory::install();
  torch_memory.release_kept();
  torch_memory.reset_peak();
  reset_heap_peak();
  const std::int64_t heap = heap_used();
  const auto tensors = static_cast<std::int64_t>(torch_memory.stats().used);
  work();
  return heap_peak() - heap + static_cast<std::int64_t>(torch_memory.stats().peak_used) - tensors;
}

// Tables that are trained whole are written as they come, whoever writes them.
TEST(SessionOfAdapters, WritesLargeTablesPieceByPiece) {
  const Folder folder;
  std::filesystem::create_directories(folder.path);
  std::ofstream(folder.path / "config.json") << kWideVocabulary;
  init_checkpoint(folder.path / "config.json", folder.path / "base", 1);
  SessionOptions options = resident(1);
  options.host_memory = 256 * kMiB;
  options.device_memory = 128 * kMiB;
  Session session(
      with_adapters(load(folder.path / "base"), {.rank = 2, .alpha = 2, .saved = {"embed_tokens", "lm_head"}}, 5),
      options);
  constexpr std::int64_t kTable = std::int64_t{4} * 131072 * 32;
  EXPECT_LT(most_of([&] { session.export_adapter(folder.path / "adapter"); }), kTable / 8);
  EXPECT_LT(most_of([&] { session.export_merged(folder.path / "base", folder.path / "merged"); }), kTable * 5 / 8);
  EXPECT_LT(most_of([&] { merge_adapter(folder.path / "base", folder.path / "adapter", folder.path / "whole"); }),
            kTable * 5 / 8);
}

// The updates of a step may wait for the next one.
TEST(SessionOfAdapters, AMergedModelHasTheUpdatesOfItsLastStep) {
  const Folder folder;
  const auto in = [&](const char* name) { return folder.path / name; };
  const auto weights = [&](const char* name) { return read_text(in(name) / "model.safetensors", 256 * kMiB); };
  std::filesystem::create_directories(folder.path);
  std::ofstream(in("config.json")) << kWideVocabulary;
  init_checkpoint(in("config.json"), in("base"), 1);
  Session session(with_adapters(load(in("base")), {.rank = 2, .alpha = 8}, 5), resident(1));
  session.step(batches(1, 0), 1e-2);
  session.export_merged(in("base"), in("merged"));
  session.export_adapter(in("adapter"));
  merge_adapter(in("base"), in("adapter"), in("whole"));
  EXPECT_TRUE(weights("merged") == weights("whole"));
  EXPECT_FALSE(weights("merged") == weights("base"));
}

constexpr const char* kWideLayer =
    R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 384,
        "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": false, "hidden_act": "silu"})";

// What the first weights take while they come, beside the arrangement, is in the plan, and little more than is taken.
TEST(SessionOfAdapters, FirstValuesTakeWhatThePlanSays) {
  for (const auto& [init, dora, format] : {std::tuple{"default", false, WeightFormat::nf4_double},
                                           {"default", true, WeightFormat::bf16},
                                           {"default", true, WeightFormat::int8},
                                           {"pissa", false, WeightFormat::bf16},
                                           {"pissa_niter_2", false, WeightFormat::nf4},
                                           {"olora", false, WeightFormat::nf4}}) {
    SCOPED_TRACE(std::string(init) + " " + weight_format_name(format));
    AdapterConfig config{.rank = 8, .alpha = 8, .dora = dora};
    set_adapter_init(config, init);
    Model model = with_adapters(
        with_base_format({make_model(parse_model_spec(kWideLayer, "wide")), initial(11)}, format), config, 5);
    std::int64_t heap = 0, tensors = 0, most = 0;
    DeviceMemory& torch_memory = DeviceMemory::install();
    std::once_flag begun;
    model.weights = [&, weights = model.weights](const TensorSpec& tensor, std::uint64_t first, std::span<float> out) {
      std::call_once(begun, [&] {
        torch_memory.reset_peak();
        reset_heap_peak();
        heap = heap_used();
        tensors = static_cast<std::int64_t>(torch_memory.stats().used);
      });
      weights(tensor, first, out);
    };
    SessionOptions options = resident(1);
    const Session session(model, options, {}, [&](const char*, std::uint64_t, std::uint64_t) {
      most = heap_peak() - heap + static_cast<std::int64_t>(torch_memory.stats().peak_used) - tensors;
    });
    const auto planned = static_cast<std::int64_t>(session.plan().loading);
    constexpr std::int64_t kPieces = 512 * 1024;
    EXPECT_LE(most, planned + kPieces);
    EXPECT_LE(planned, 2 * most + kPieces);
  }
}

// What may be taken while first values come is given back when they are there.
TEST(SessionOfAdapters, AfterFirstValuesTheBudgetIsThatOfSteps) {
  DeviceMemory& torch_memory = DeviceMemory::install();
  for (const AdapterInit init : {AdapterInit::pissa, AdapterInit::lora_ga}) {
    const AdapterConfig config{.rank = 8, .alpha = 8, .init = init};
    Session session(with_adapters({make_model(parse_model_spec(kWideLayer, "wide")), initial(11)}, config, 5),
                    resident(1));
    if (init == AdapterInit::lora_ga) {
      std::vector<MicroBatch> some = batches(1, 0);
      for (torch::Tensor* tokens : {&some[0].ids, &some[0].labels}) tokens->remainder_(64);
      session.begin_with_gradient(some);
    }
    const std::uint64_t slots = session.plan().arrangement.device_bytes();
    EXPECT_LT(session.memory().device_peak, slots + torch_memory.stats().held + kMiB / 2);
    ASSERT_GT(session.plan().loading, kMiB);
    const auto take = [&](std::int64_t beyond) {
      torch_memory.release_kept();
      const auto room = static_cast<std::int64_t>(session.options().device_memory - slots - torch_memory.stats().held);
      torch::empty({room + beyond}, torch::kUInt8);
    };
    EXPECT_NO_THROW(take(-(1 << 19)));
    EXPECT_THROW(take(1 << 19), c10::OutOfMemoryError);
  }
}

constexpr const char* kWideExperts =
    R"({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 64, "hidden_size": 32,
        "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2,
        "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": false, "hidden_act": "silu"})";

// A factor of all experts, which the folder has in columns, is held whole: the largest B is 2 MiB in fp32. One at a
// time is written; of those that are read the last two stay.
TEST(SessionOfAdapters, FactorsOfExpertsTakeWhatThePlanSays) {
  const Folder folder;
  std::filesystem::create_directories(folder.path);
  const Model base{make_model(parse_model_spec(kWideExperts, "wide", {.block_elements = 1, .experts = 3})),
                   initial(11)};
  const AdapterConfig config{.rank = 64, .parameters = {"experts.gate_up_proj"}, .parameters_alone = true};
  constexpr std::int64_t kFactor = std::int64_t{4} * 8 * 1024 * 64, kPieces = 512 * 1024;
  const auto expect_factors = [&](int factors, std::int64_t planned, const std::function<void()>& work) {
    EXPECT_EQ(planned, factors * kFactor);
    const std::int64_t most = most_of(work);
    EXPECT_LE(most, planned + kPieces);
    EXPECT_LE(planned, 2 * most);
  };
  Session session(with_adapters(base, config, 5), resident(1));
  expect_factors(1, static_cast<std::int64_t>(session.plan().exporting),
                 [&] { session.export_adapter(folder.path / "adapter"); });

  const Model read = with_adapters(base, folder.path / "adapter");
  std::vector<float> piece(1000);
  expect_factors(2, static_cast<std::int64_t>(session.plan().loading), [&] {
    for (const UnitSpec& unit : read.spec().units)
      for (const TensorSpec& tensor : unit.tensors)
        if (is_adapter(tensor)) read.weights(tensor, 0, piece);
  });
}

// A budget that has no room for it is refused before anything is read.
TEST(SessionOfAdapters, ABudgetWithoutRoomForFirstValuesIsRefused) {
  const Folder folder;
  AdapterConfig config{.rank = 8, .alpha = 8};
  const auto begin = [&] {
    SessionOptions options = streamed(resident(1), folder);
    options.device_memory = 32 * kMiB;
    options.host_memory = 4 * kMiB;
    const Session session(with_adapters({make_model(parse_model_spec(kWideLayer, "wide")), initial(11)}, config, 5),
                          options);
    EXPECT_LE(session.memory().host_used, options.host_memory);
  };
  begin();
  config.init = AdapterInit::pissa;
  expect_refusal(io::ErrorKind::usage, {"--host-memory", "the smallest that works is"}, begin);
}

}  // namespace
}  // namespace tierflow::testing

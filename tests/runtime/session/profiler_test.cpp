// What is measured of a model's stages, on the model itself and on a narrower one.
#include "runtime/session/profiler.h"

#include <gtest/gtest.h>
#include <torch/utils.h>

#include <chrono>

#include "runtime/planning/stage_cost.h"
#include "runtime/session/stage_probe.h"
#include "runtime/spec/stage_class.h"
#include "swap/device.h"
#include "tests/runtime/session/fixture.h"

namespace tierflow::testing {
namespace {

ModelSpec eight_heads() {
  return parse_model_spec(
      R"({"architectures":["LlamaForCausalLM"],"model_type":"llama","vocab_size":512,"hidden_size":256,)"
      R"("intermediate_size":512,"num_attention_heads":8,"num_key_value_heads":4,"max_position_embeddings":128,)"
      R"("rms_norm_eps":1e-5,"tie_word_embeddings":false,"hidden_act":"silu","num_hidden_layers":3})",
      "config.json");
}

// One thread: a library that splits a product's sum over threads takes memory for it, at some widths and processors.
class OneThread {
 public:
  OneThread() { torch::set_num_threads(1); }
  ~OneThread() { torch::set_num_threads(threads_); }

 private:
  const int threads_ = torch::get_num_threads();
};

// No time at all is enough for three of four parts of the width; bytes come close to those of the whole.
TEST(MeasureModel, ScalesWhatTakesTooLongAndSaysHowLongItTakes) {
  const OneThread one_thread;
  const ModelSpec spec = eight_heads();
  const SessionOptions options{.micro_batch = 2, .sequence_length = 64};
  std::vector<std::string> lines;
  const ModelProfile scaled =
      measure_model(spec, options, /*seconds=*/1e-3, [&](const std::string& line) { lines.push_back(line); });
  EXPECT_EQ(scaled.width, 0.75);
  EXPECT_EQ(scaled.seconds_allowed, 1e-3);
  ASSERT_FALSE(lines.empty());
  EXPECT_NE(lines[0].find("about "), std::string::npos) << lines[0];
  EXPECT_NE(lines[0].find("at 3/4 of their width"), std::string::npos) << lines[0];
  ASSERT_TRUE(scaled.covers(spec));
  const ComputeNeeds found = scaled.needs(spec);
  const ComputeNeeds right =
      StageProbe(*make_model(spec), DeviceMemory::install(), torch::kCPU).measure(2, 64, /*train=*/true).needs;
  const auto near = [](std::uint64_t a, std::uint64_t b) {
    EXPECT_NEAR(static_cast<double>(a), static_cast<double>(b), 0.05 * static_cast<double>(b) + 4096);
  };
  ASSERT_EQ(found.carry_bytes.size(), right.carry_bytes.size());
  for (std::size_t stage = 0; stage < right.carry_bytes.size(); ++stage) {
    near(found.carry_bytes[stage], right.carry_bytes[stage]);
    near(found.activation_bytes[stage], right.activation_bytes[stage]);
    near(found.swapped_bytes[stage], right.swapped_bytes[stage]);
  }
  near(found.stage_peak, right.stage_peak);
  near(found.keeping_peak, right.keeping_peak);
  near(found.micro_batch_bytes, right.micro_batch_bytes);
  for (const auto& [name, stage] : scaled.stages)
    if (stage.activation_bytes != 0) {
      EXPECT_GT(stage.seconds.forward, 0) << name;
      EXPECT_GT(stage.seconds.backward, 0) << name;
    }
}

// What no memory holds is measured with fewer sequences, which also takes less time.
TEST(MeasureModel, ScalesAMicroBatchThatNoMemoryHolds) {
  const OneThread one_thread;
  const ModelSpec spec = eight_heads();
  const SessionOptions options{.micro_batch = std::int64_t{1} << 22, .sequence_length = 64};
  std::string said;
  const auto started = std::chrono::steady_clock::now();
  const ModelProfile profile =
      measure_model(spec, options, /*seconds=*/2, [&](const std::string& line) { said += line; });
  EXPECT_LT(std::chrono::steady_clock::now() - started, std::chrono::seconds(60));
  EXPECT_NE(said.find("of the micro-batch's 4194304 sequences"), std::string::npos) << said;
  const auto hidden = static_cast<std::uint64_t>(spec.config.hidden_size);
  EXPECT_EQ(profile.needs(spec).carry_bytes[1], (std::uint64_t{1} << 22) * 64 * hidden * 2);
}

// What shapes alone say of a model's activations is what computing it shows; of the rest it is near, and rather more:
// kernels of a GPU take memory that the CPU's do not.
TEST(StageCost, OfShapesIsWhatTheProbeFinds) {
  const OneThread one_thread;
  const std::string sizes =
      R"("vocab_size":4096,"hidden_size":256,"intermediate_size":768,"num_attention_heads":8,"num_key_value_heads":2,)"
      R"("head_dim":32,"max_position_embeddings":2048,"rms_norm_eps":1e-5,"hidden_act":"silu","num_hidden_layers":2,)";
  for (const std::string& kind :
       {std::string(R"("architectures":["LlamaForCausalLM"],"model_type":"llama","tie_word_embeddings":false)"),
        std::string(R"("architectures":["Qwen3ForCausalLM"],"model_type":"qwen3","tie_word_embeddings":true)"),
        std::string(R"("architectures":["MixtralForCausalLM"],"model_type":"mixtral","num_local_experts":4,)"
                    R"("num_experts_per_tok":2,"tie_word_embeddings":false)"),
        std::string(R"("architectures":["OPTForCausalLM"],"model_type":"opt","ffn_dim":1024,"word_embed_proj_dim":256,)"
                    R"("do_layer_norm_before":true,"activation_function":"relu")"),
        std::string(R"("architectures":["Starcoder2ForCausalLM"],"model_type":"starcoder2","use_bias":true,)"
                    R"("norm_epsilon":1e-5,"residual_dropout":0,"embedding_dropout":0,"tie_word_embeddings":true)")})
    for (const Tiling& tiling : {Tiling{}, Tiling{.vocabulary_elements = 1 << 19, .block_elements = 1 << 19}}) {
      const ModelSpec spec = parse_model_spec("{" + sizes + kind + "}", "config.json", tiling);
      const ProbedModel probed =
          StageProbe(*make_model(spec), DeviceMemory::install(), torch::kCPU).measure(2, 1024, /*train=*/true);
      std::uint64_t peak = 0, handed = 0;
      for (int stage = 0; stage < static_cast<int>(spec.stages.size()); ++stage) {
        const StageCost cost = stage_cost(spec, stage, 2, 1024);
        const auto kind_of_stage = static_cast<int>(spec.stages[stage].kind);
        EXPECT_EQ(cost.carry_bytes, probed.needs.carry_bytes[stage]) << kind << kind_of_stage;
        EXPECT_EQ(cost.activation_bytes, probed.needs.activation_bytes[stage]) << kind << kind_of_stage;
        EXPECT_EQ(cost.swapped_bytes, probed.needs.swapped_bytes[stage]) << kind << kind_of_stage;
        EXPECT_GE(static_cast<double>(cost.keeping_peak), 0.95 * static_cast<double>(probed.keeping_peaks[stage]))
            << kind << kind_of_stage;
        peak = std::max(peak, cost.peak);
        handed = std::max(handed, cost.handed_bytes);
      }
      EXPECT_GE(static_cast<double>(peak), 0.95 * static_cast<double>(probed.needs.stage_peak)) << kind;
      EXPECT_LE(static_cast<double>(peak), 3 * static_cast<double>(probed.needs.stage_peak)) << kind;
      const auto all = static_cast<double>(2 * handed + shared_bytes(spec, 2, 1024));
      EXPECT_GE(all, 0.95 * static_cast<double>(probed.needs.micro_batch_bytes)) << kind;
      EXPECT_LE(all, 1.3 * static_cast<double>(probed.needs.micro_batch_bytes)) << kind;
    }
}

// Counts the calls of blocks that are given zeros alone, and the others.
class CountsInputs : public ForwardingModel {
 public:
  using ForwardingModel::ForwardingModel;
  Carry forward(int stage, const Weights& weights, const Carry& carry, const Shared& shared,
                bool training) const override {
    if (!carry.empty()) ++(carry[0].count_nonzero().item<std::int64_t>() == 0 ? zeros : others);
    return ForwardingModel::forward(stage, weights, carry, shared, training);
  }
  mutable int zeros = 0, others = 0;
};

// Memory is measured with zeros, which send all tokens to the same experts; time with numbers that spread them.
TEST(StageProbe, TimedStagesTakeOrdinaryNumbers) {
  const auto device = swap::open_cpu_device();
  const CountsInputs model(make_model(eight_heads()));
  DeviceMemory::install().set_cap(UINT64_MAX);
  StageProbe(model, DeviceMemory::install(), torch::kCPU, {.device = device.get(), .seconds_each = 1e-3})
      .measure(2, 64, /*train=*/true);
  EXPECT_GT(model.zeros, 0);
  EXPECT_GE(model.others, 3);
}

TEST(MeasureModel, MeasuresTheModelItselfWhereThereIsTime) {
  const ModelSpec spec = eight_heads();
  std::string said;
  const ModelProfile whole = measure_model(spec, {.micro_batch = 1, .sequence_length = 16}, /*seconds=*/2,
                                           [&](const std::string& line) { said += line; });
  EXPECT_EQ(whole.width, 1);
  EXPECT_EQ(said.find("width"), std::string::npos) << said;
  EXPECT_GE(whole.readings.spread, 0);
}

}  // namespace
}  // namespace tierflow::testing

// Losses and gradient norms of a few steps of a small model of every family, as golden/losses.txt has them: a change
// that is not meant to alter numbers alters none of these. Weights come from a seed, tokens too; the device is the CPU.
//
// On a machine of the kind that wrote the file each number has to be the same to the bit. LibTorch's products add up in
// another order where the processor's maker, its vector instructions or LibTorch's version are others. There losses
// have to agree to a hundredth and norms to a sixth, which is twice the most that was seen between AVX-512, AVX2 and
// neither (0.4% and 7%, of gpt-oss, whose tokens may go to other experts). The number of threads changes nothing: one
// does all of it.
//
// TIERFLOW_WRITE_GOLDEN=1 writes the file anew.
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <gtest/gtest.h>
#include <torch/version.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "runtime/device/device_memory.h"
#include "tests/runtime/session/fixture.h"

namespace tierflow::testing {
namespace {

constexpr int kSteps = 3;
constexpr double kLossElsewhere = 0.01, kNormElsewhere = 1.0 / 6;

// The classes of docs/models.md that the other tests of models here have no case of.
std::vector<Case> all_families() {
  std::vector<Case> all = cases();
  const std::string experts = R"(, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16)";
  const std::string slides = R"(, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"])";
  all.insert(all.end(), {
                            {"gemma", llama_json("GemmaForCausalLM", R"(, "head_dim": 8)")},
                            {"glm", llama_json("GlmForCausalLM", R"(, "head_dim": 8)")},
                            {"glm4", llama_json("Glm4ForCausalLM", R"(, "head_dim": 8)")},
                            {"olmo3", llama_json("Olmo3ForCausalLM", slides)},
                            {"smollm3", llama_json("SmolLM3ForCausalLM", R"(, "no_rope_layer_interval": 2)")},
                            {"seed_oss", llama_json("SeedOssForCausalLM", R"(, "head_dim": 8, "attention_dropout": 0.0,
        "residual_dropout": 0.0)")},
                            {"exaone4", llama_json("Exaone4ForCausalLM", slides)},
                            {"arcee", llama_json("ArceeForCausalLM", R"(, "mlp_bias": true)")},
                            {"ernie4_5", llama_json("Ernie4_5ForCausalLM", R"(, "head_dim": 8, "use_bias": true)")},
                            {"qwen3_moe", llama_json("Qwen3MoeForCausalLM", R"(, "head_dim": 8)" + experts)},
                            {"olmoe", llama_json("OlmoeForCausalLM", experts, 24)},
                        });
  return all;
}

// What decides the bits of LibTorch's products.
std::string this_machine() {
  std::string text = "torch " TORCH_VERSION ", " + at::get_cpu_capability();
#if defined(__x86_64__)
  text += __builtin_cpu_is("amd") ? ", AMD" : __builtin_cpu_is("intel") ? ", Intel" : ", another maker";
  if (__builtin_cpu_supports("avx512bf16")) text += ", bf16";
  if (__builtin_cpu_supports("amx-bf16")) text += ", tiles";
#endif
  return text;
}

// The losses of the steps, then the norms of their gradients.
std::vector<double> numbers_of(const Case& which) {
  const SessionOptions options = resident(2);
  Session session({make_model(parse_model_spec(which.json, which.name)), initial(11)}, options, {.weight_decay = 0.1});
  std::vector<double> losses, norms;
  for (int step = 0; step < kSteps; ++step) {
    const StepResult result = session.step(batches(options.micro_batches, step), 1e-2);
    losses.push_back(result.loss);
    norms.push_back(result.grad_norm);
  }
  losses.insert(losses.end(), norms.begin(), norms.end());
  return losses;
}

class GoldenLosses : public ::testing::Test {
 protected:
  void SetUp() override {
    DeviceMemory::install();
    at::set_num_threads(1);
    std::ifstream in(file());
    std::getline(in, machine_);
    for (std::string line; std::getline(in, line);) {
      std::istringstream words(line);
      std::string name, number;
      words >> name;
      while (words >> number) golden_[name].push_back(std::strtod(number.c_str(), nullptr));
    }
  }
  void TearDown() override { at::set_num_threads(threads_); }
  static std::string file() { return TIERFLOW_GOLDEN_LOSSES; }

  const int threads_ = at::get_num_threads();
  std::string machine_;
  std::map<std::string, std::vector<double>> golden_;
};

TEST_F(GoldenLosses, NothingChangesThem) {
  std::map<std::string, std::vector<double>> found;
  for (const Case& which : all_families()) found[which.name] = numbers_of(which);
  if (std::getenv("TIERFLOW_WRITE_GOLDEN") != nullptr) {
    std::ofstream out(file());
    out << this_machine() << '\n' << std::hexfloat;
    for (const auto& [name, numbers] : found) {
      out << name;
      for (const double number : numbers) out << ' ' << number;
      out << '\n';
    }
    ASSERT_TRUE(out.flush()) << file();
    return;
  }
  for (const auto& [name, numbers] : found) {
    SCOPED_TRACE(name + " here (" + this_machine() + ") and where they were written (" + machine_ + ")");
    const std::vector<double>& golden = golden_[name];
    ASSERT_EQ(golden.size(), numbers.size());
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      if (this_machine() == machine_)
        EXPECT_EQ(numbers[i], golden[i]) << i;
      else
        EXPECT_NEAR(numbers[i], golden[i], (i < kSteps ? kLossElsewhere : kNormElsewhere) * golden[i]) << i;
    }
  }
  EXPECT_EQ(golden_.size(), found.size());
}

// The error about a class that is not known lists those that are.
TEST_F(GoldenLosses, AreOfEveryFamily) {
  std::set<std::string> tested;
  for (const Case& which : all_families()) tested.insert(parse_model_spec(which.json, which.name).config.architecture);
  std::string known;
  try {
    parse_model_spec(llama_json("UnknownForCausalLM", ""), "unknown");
  } catch (const Exception& error) {
    known = error.what();
  }
  const std::string begin = "supported are ";
  ASSERT_NE(known.find(begin), std::string::npos) << known;
  std::istringstream names(known.substr(known.find(begin) + begin.size()));
  int count = 0;
  for (std::string name; names >> name; ++count) {
    const bool last = name.back() != ',';
    name.erase(name.find_last_not_of(",;") + 1);
    EXPECT_TRUE(tested.contains(name)) << name;
    if (last) break;
  }
  EXPECT_GT(count, 30);
}

}  // namespace
}  // namespace tierflow::testing

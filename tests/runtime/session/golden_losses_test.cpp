// Losses and gradient norms of a few steps of a small model of every family, as golden/losses.txt has them: a change
// that is not meant to alter numbers alters none of these. Weights come from a seed, tokens too; the device is the CPU.
//
// The file has a part for each kind of machine that has written one. On a machine of such a kind each number has to be
// the same to the bit, but for a model that was added since: it is compared closely with a part that has it. LibTorch's
// products add up in another order where the processor's maker, its vector instructions or LibTorch's version are
// others. On a kind without a part losses have to agree with the first part's to a hundredth and norms to a sixth,
// which is twice the most that was seen between AVX-512, AVX2 and neither (0.4% and 7%, of gpt-oss, whose tokens may go
// to other experts). The test's report says which it was. The number of threads changes nothing: one does all of it.
//
// TIERFLOW_WRITE_GOLDEN=1 writes this machine's part anew, or adds it. Where numbers are meant to change, remove the
// parts of the other kinds; a new model is in this one alone, which does no harm to the others.
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <gtest/gtest.h>
#include <torch/version.h>

#include <algorithm>
#include <cstdio>
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
  std::vector<Case> all = cases_with_balance();
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
                            {"helium", llama_json("HeliumForCausalLM", R"(, "head_dim": 8)")},
                            {"cwm", llama_json("CwmForCausalLM", R"(, "head_dim": 8, "sliding_window": 5)")},
                            {"hyperclovax", llama_json("HyperCLOVAXForCausalLM", R"(, "logits_scaling": 0.5)")},
                            {"stablelm", llama_json("StableLmForCausalLM", R"(, "partial_rotary_factor": 0.5,
        "use_qkv_bias": true)")},
                            {"jais2", llama_json("Jais2ForCausalLM", "")},
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
  Session session(plain_model(which), options, {.weight_decay = 0.1});
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
  using Numbers = std::map<std::string, std::vector<double>>;
  struct Part {
    std::string machine;
    Numbers numbers;
  };

  void SetUp() override {
    DeviceMemory::install();
    at::set_num_threads(1);
    std::ifstream in(file());
    for (std::string line; std::getline(in, line);) {
      if (line.starts_with("torch ")) {
        parts_.push_back({line, {}});
        continue;
      }
      ASSERT_FALSE(parts_.empty()) << file() << " begins with the name of no machine";
      std::istringstream words(line);
      std::string name, number;
      words >> name;
      while (words >> number) parts_.back().numbers[name].push_back(std::strtod(number.c_str(), nullptr));
    }
  }
  void TearDown() override { at::set_num_threads(threads_); }
  static std::string file() { return TIERFLOW_GOLDEN_LOSSES; }

  // This machine's part; the end where its kind has none.
  std::vector<Part>::iterator here() {
    return std::find_if(parts_.begin(), parts_.end(), [](const Part& each) { return each.machine == this_machine(); });
  }

  void write(const Numbers& found) {
    if (here() == parts_.end()) parts_.push_back({this_machine(), {}});
    here()->numbers = found;
    std::ofstream out(file());
    out << std::hexfloat;
    for (const auto& [machine, numbers] : parts_) {
      out << machine << '\n';
      for (const auto& [name, values] : numbers) {
        out << name;
        for (const double value : values) out << ' ' << value;
        out << '\n';
      }
    }
    ASSERT_TRUE(out.flush()) << file();
  }

  const int threads_ = at::get_num_threads();
  std::vector<Part> parts_;
};

TEST_F(GoldenLosses, NothingChangesThem) {
  Numbers found;
  for (const Case& which : all_families()) found[which.name] = numbers_of(which);
  if (std::getenv("TIERFLOW_WRITE_GOLDEN") != nullptr) return write(found);
  ASSERT_FALSE(parts_.empty());
  if (here() != parts_.end()) std::rotate(parts_.begin(), here(), here() + 1);
  RecordProperty("compared", parts_.front().machine == this_machine() ? "to the bit" : "closely");
  std::printf("%s; compared first with %s\n", this_machine().c_str(), parts_.front().machine.c_str());
  std::size_t written = 0;
  for (const auto& [name, numbers] : found) {
    const auto golden = std::ranges::find_if(parts_, [&](const Part& part) { return part.numbers.contains(name); });
    ASSERT_NE(golden, parts_.end()) << name << " is in no part of " << file();
    const bool to_the_bit = golden->machine == this_machine();
    written += parts_.front().numbers.count(name);
    SCOPED_TRACE(name + " here (" + this_machine() + ") and where they were written (" + golden->machine + ")");
    const std::vector<double>& expected = golden->numbers.at(name);
    ASSERT_EQ(expected.size(), numbers.size());
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      if (to_the_bit)
        EXPECT_EQ(numbers[i], expected[i]) << i;
      else
        EXPECT_NEAR(numbers[i], expected[i], (i < kSteps ? kLossElsewhere : kNormElsewhere) * expected[i]) << i;
    }
  }
  EXPECT_EQ(parts_.front().numbers.size(), written) << "a model that is no longer here";
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

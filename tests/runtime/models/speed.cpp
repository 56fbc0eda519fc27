// Times one Llama block (forward, and backward from its input), the head and the embedding, and counts the memory that
// torch asks for beside weights, gradients and carry. Driven by speed.py and benchmarks/step/packed.py: a line on
// standard input (block, default, forward, attention, head, embedding) runs it once and prints "milliseconds
// peak-bytes". DOCUMENTS (1): how many of one length a row is packed with.
//   models_speed HIDDEN INTERMEDIATE HEADS KV_HEADS BATCH LENGTH VOCAB [DOCUMENTS]
#include <c10/core/CPUAllocator.h>
#include <fmt/format.h>
#include <malloc.h>
#include <torch/utils.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <iostream>

#include "runtime/models/attention.h"
#include "tests/runtime/models/run.h"

namespace tierflow::testing {
namespace {

// Counts the live bytes of glibc's heap blocks that torch holds.
class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    void* data = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (data == nullptr && bytes != 0) throw std::bad_alloc();
    const auto size = static_cast<std::int64_t>(malloc_usable_size(data));
    peak_ = std::max<std::int64_t>(peak_, live_ += size);
    return {data, data, &release, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
  static void restart() { peak_ = live_.load(); }
  static std::int64_t live() { return live_; }
  static std::int64_t peak() { return peak_; }

 private:
  static void release(void* data) {
    live_ -= static_cast<std::int64_t>(malloc_usable_size(data));
    std::free(data);
  }

  inline static std::atomic<std::int64_t> live_ = 0, peak_ = 0;
};

// Attention alone, forward and backward.
void attend(const torch::Tensor& q, const torch::Tensor& kv, const torch::Tensor& d_out,
            const models::AttentionRules& rules) {
  const models::BlockAttention result = models::attention_in_blocks(q, kv, kv, rules);
  models::attention_in_blocks_backward(d_out, q, kv, kv, result, rules);
}

int run(char** arguments, std::int64_t documents) {
  CountingAllocator counter;
  c10::SetCPUAllocator(&counter, /*priority=*/100);
  const auto number = [&](int i) { return std::stoll(arguments[i]); };
  const std::string json = fmt::format(
      R"({{"architectures": ["LlamaForCausalLM"], "vocab_size": {}, "hidden_size": {}, "intermediate_size": {},
      "num_hidden_layers": 1, "num_attention_heads": {}, "num_key_value_heads": {}, "max_position_embeddings": 65536}})",
      number(7), number(1), number(2), number(3), number(4));
  {
    ResidentModel m(parse_model_spec(json, "block"), torch::kBFloat16);
    m.randomise(1, 0.02);
    const std::int64_t rows = number(5), length = number(6);
    const MicroBatch batch{
        .ids = torch::randint(number(7), {rows, length}, torch::kLong),
        .labels = torch::randint(number(7), {rows, length}, torch::kLong),
        .positions = torch::arange(length).remainder((length + documents - 1) / documents).expand({rows, length})};
    const Shared shared = m.model->share(batch, torch::kCPU);
    const Carry in = {torch::randn({rows, length, number(1)}).to(torch::kBFloat16)};
    const Carry d_out = {torch::randn_like(in[0]) * 0.01};
    const auto heads = [&](int count) {
      return torch::randn({rows, length, number(count), number(1) / number(3)}).to(torch::kBFloat16);
    };
    const torch::Tensor q = heads(3), kv = heads(4), d_heads = heads(3);
    const Weights weights = m.bind(1, m.units);
    const Gradients gradients = m.bind(1, m.gradients);
    for (std::string line; std::getline(std::cin, line);) {
      const std::int64_t before = counter.live();
      counter.restart();
      const auto start = std::chrono::steady_clock::now();
      if (line == "head") {
        m.model->head_loss_and_backward(m.bind(2, m.units), m.bind(2, m.gradients), in, shared, 1e-3);
      } else if (line == "embedding") {
        m.model->backward(0, m.bind(0, m.units), m.bind(0, m.gradients), {}, shared, d_out);
      } else if (line == "attention") {
        attend(q, kv, d_heads, {.documents = shared.documents});
      } else {
        const torch::NoGradGuard no_grad;
        m.model->forward(1, weights, in, shared, true);
      }
      if (line == "default") m.model->LayeredModel::backward(1, weights, gradients, in, shared, d_out);
      if (line == "block") m.model->backward(1, weights, gradients, in, shared, d_out);
      const std::chrono::duration<double, std::milli> elapsed = std::chrono::steady_clock::now() - start;
      std::cout << elapsed.count() << " " << counter.peak() - before << std::endl;
    }
  }
  return 0;
}

}  // namespace
}  // namespace tierflow::testing

int main(int count, char** arguments) {
  if (count != 8 && count != 9) {
    std::cerr << "usage: models_speed HIDDEN INTERMEDIATE HEADS KV_HEADS BATCH LENGTH VOCAB [DOCUMENTS]\n";
    return 2;
  }
  return tierflow::testing::run(arguments, count == 9 ? std::stoll(arguments[8]) : 1);
}

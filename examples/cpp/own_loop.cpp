// A training loop of one's own over modules of one's own, their state in a storage folder:
//     own_loop STORAGE
// Learns a rule by which each token decides the next, under a warm-up and a cosine, looks at held-out data on the way,
// and then predicts with plain LibTorch and the trained weights. Exits with 1 where it did not learn.
#include <cmath>
#include <cstdio>
#include <exception>
#include <numbers>

#include "runtime/tierflow.h"

using namespace tierflow::literals;

namespace {

constexpr int kVocabulary = 64, kWidth = 96, kBlocks = 6, kLength = 32, kRows = 8, kMicroBatches = 2, kSteps = 30;

struct Embed : tierflow::Layer {
  torch::nn::Embedding table = register_module("table", torch::nn::Embedding(kVocabulary, kWidth));
  tierflow::Carry forward(const tierflow::Carry&, const tierflow::Shared& shared) override {
    return {table(shared.ids)};
  }
};

struct Block : tierflow::Layer {
  torch::nn::LayerNorm norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
  torch::nn::Linear up = register_module("up", torch::nn::Linear(kWidth, 4 * kWidth));
  torch::nn::Linear down = register_module("down", torch::nn::Linear(4 * kWidth, kWidth));
  tierflow::Carry forward(const tierflow::Carry& carry, const tierflow::Shared&) override {
    return {carry[0] + down(torch::gelu(up(norm(carry[0]))))};
  }
};

struct Head : tierflow::Layer {
  torch::nn::Linear out = register_module("out", torch::nn::Linear(kWidth, kVocabulary));
  tierflow::Carry forward(const tierflow::Carry& carry, const tierflow::Shared& shared) override {
    const auto options = torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum).ignore_index(-100);
    const torch::Tensor logits = out(carry[0]).flatten(0, 1).to(torch::kFloat32);
    return {torch::nn::functional::cross_entropy(logits, shared.labels.flatten(), options)};
  }
};

torch::Tensor next_token(const torch::Tensor& ids) {
  return (ids * 5 + 3) % kVocabulary;
}

std::vector<tierflow::MicroBatch> draw(int count) {
  std::vector<tierflow::MicroBatch> batches;
  for (int i = 0; i < count; ++i) {
    const torch::Tensor ids = torch::randint(kVocabulary, {kRows, kLength}, torch::kInt64);
    batches.push_back({.ids = ids, .labels = next_token(ids)});
  }
  return batches;
}

double learning_rate(int step) {
  constexpr double peak = 3e-3;
  constexpr int warm_up = 5;
  if (step < warm_up) return peak * (step + 1) / warm_up;
  return peak * (0.55 + 0.45 * std::cos(std::numbers::pi * (step - warm_up) / (kSteps - warm_up)));
}

// Copies trained fp32 masters into a module that is all in memory.
template <class Module>
Module trained(tierflow::Session& session, const std::string& name) {
  Module module;
  const torch::NoGradGuard no_grad;
  for (auto& parameter : module.named_parameters()) {
    std::vector<float> values = session.master(name + "." + parameter.key());
    parameter.value().copy_(torch::from_blob(values.data(), parameter.value().sizes()));
  }
  return module;
}

double share_predicted(tierflow::Session& session) {
  const torch::NoGradGuard no_grad;
  const torch::Tensor ids = torch::arange(kVocabulary).unsqueeze(0);
  tierflow::Carry hidden = trained<Embed>(session, "embed").forward({}, {.ids = ids});
  for (int i = 0; i < kBlocks; ++i)
    hidden = trained<Block>(session, "blocks." + std::to_string(i)).forward(hidden, {.ids = ids});
  const torch::Tensor logits = trained<Head>(session, "head").out(hidden[0]);
  return logits.argmax(-1).eq(next_token(ids)).to(torch::kFloat64).mean().item<double>();
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 2) {
    std::fprintf(stderr, "usage: own_loop STORAGE\n");
    return 2;
  }
  torch::manual_seed(1);
  tierflow::Layers layers;
  layers.add("embed", [] { return std::make_shared<Embed>(); })
      .repeat(kBlocks, "blocks", [] { return std::make_shared<Block>(); })
      .add("head", [] { return std::make_shared<Head>(); });
  const tierflow::SessionOptions options{
      .device_memory = 16_MiB,
      .host_memory = 1_MiB,  // less than the state
      .storage = {argv[1]},
      .allow_buffered = true,  // so that the example runs on any file system; leave both out on a real drive
      .allow_any_filesystem = true,
      .micro_batch = kRows,
      .micro_batches = kMicroBatches,
      .sequence_length = kLength};
  tierflow::Session session(layers.build(), options, {.weight_decay = 0.01});
  std::printf("%s\n", session.describe().c_str());

  const std::vector<tierflow::MicroBatch> held_out = draw(kMicroBatches);
  for (int step = 0; step < kSteps; ++step) {
    const tierflow::StepResult result = session.step(draw(kMicroBatches), learning_rate(step));
    if (result.skipped) std::printf("step %d skipped: a gradient was not finite\n", step + 1);
    if ((step + 1) % 10 == 0)
      std::printf("step %d: loss %.3f, held out %.3f, gradient norm %.2f\n", step + 1, result.loss,
                  session.evaluate(held_out).loss, result.grad_norm);
  }
  const double share = share_predicted(session);
  std::printf("%.0f%% of the tokens are predicted\n", 100 * share);
  return share > 0.9 ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}

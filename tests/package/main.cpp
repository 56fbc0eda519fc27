// Trains own modules, then a Hugging Face model, with their state in a storage folder:
//   example STORAGE MODEL OUT
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "runtime/tierflow.h"

using namespace tierflow::literals;

namespace {

constexpr int kVocabulary = 64, kWidth = 96, kLength = 32, kRows = 8;

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

// Sequences in which each token decides the next.
std::vector<tierflow::MicroBatch> data(int count) {
  std::vector<tierflow::MicroBatch> batches;
  for (int i = 0; i < count; ++i) {
    const torch::Tensor ids = torch::randint(kVocabulary, {kRows, kLength}, torch::kInt64);
    batches.push_back({.ids = ids, .labels = (ids * 5 + 3) % kVocabulary});
  }
  return batches;
}

tierflow::SessionOptions options(const char* storage, std::uint64_t device, std::uint64_t host) {
  return {.device_memory = device,
          .host_memory = host,
          .storage = {storage},
          .allow_buffered = true,  // so that the example runs on any file system; leave both out on a real drive
          .allow_any_filesystem = true,
          .micro_batch = kRows,
          .micro_batches = 2,
          .sequence_length = kLength};
}

bool learn(tierflow::Session& session, const char* what, int steps) {
  double first = 0, last = 0;
  for (int i = 0; i < steps; ++i) {
    const tierflow::StepResult step = session.step(data(2));
    if (i == 0) first = step.loss;
    last = step.loss;
  }
  std::printf("%s: loss %.3f, after %d steps %.3f; %s\n", what, first, steps, last, session.describe().c_str());
  return last < 0.8 * first;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 4) return 2;
  torch::manual_seed(1);

  tierflow::Layers layers;
  layers.add("embed", [] { return std::make_shared<Embed>(); })
      .repeat(6, "blocks", [] { return std::make_shared<Block>(); })
      .add("head", [] { return std::make_shared<Head>(); });
  bool learned = false;
  {
    tierflow::Session own(layers.build(), options(argv[1], 16_MiB, 1_MiB), {.lr = 3e-3});
    learned = learn(own, "own modules", 30);
  }

  tierflow::Session loaded(tierflow::load(argv[2]), options(argv[1], 32_MiB, 1_MiB), {.lr = 3e-3});
  learned = learn(loaded, "loaded", 30) && learned;
  loaded.export_hf(argv[3]);
  return learned ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}

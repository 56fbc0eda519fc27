// Adapters (LoRA) on layers of one's own, over a frozen base that streams:
//     own_lora STORAGE OUT
// Trains the layers as a whole on one rule, writes them to OUT/base, and then adapts them to another rule: the base
// comes from that folder and is never written, the adapters go to OUT/adapter as PEFT writes them. Exits with 1 where
// they did not learn.
#include <cstdio>
#include <exception>
#include <filesystem>

#include "runtime/tierflow.h"

using namespace tierflow::literals;

namespace {

constexpr int kVocabulary = 64, kWidth = 96, kBlocks = 6, kLength = 32, kRows = 8, kMicroBatches = 2;

struct Embed : tierflow::Layer {
  torch::nn::Embedding table = register_module("table", torch::nn::Embedding(kVocabulary, kWidth));
  tierflow::Carry forward(const tierflow::Carry&, const tierflow::Shared& shared) override {
    return {table(shared.ids)};
  }
};

// A tierflow::Linear is a torch::nn::Linear that can have an adapter.
struct Block : tierflow::Layer {
  torch::nn::LayerNorm norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
  tierflow::Linear up = register_module("up", tierflow::Linear(kWidth, 4 * kWidth));
  tierflow::Linear down = register_module("down", tierflow::Linear(4 * kWidth, kWidth));
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

// Each token decides the next: factor * token + 3.
tierflow::MicroBatch labelled(const torch::Tensor& ids, int factor) {
  return {.ids = ids, .labels = (ids * factor + 3) % kVocabulary};
}

std::vector<tierflow::MicroBatch> draw(int factor) {
  std::vector<tierflow::MicroBatch> batches;
  for (int i = 0; i < kMicroBatches; ++i)
    batches.push_back(labelled(torch::randint(kVocabulary, {kRows, kLength}, torch::kInt64), factor));
  return batches;
}

double loss_of(tierflow::Session& session, int factor) {
  return session.evaluate({labelled(torch::arange(kVocabulary).view({2, kLength}), factor)}).loss;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 3) {
    std::fprintf(stderr, "usage: own_lora STORAGE OUT\n");
    return 2;
  }
  const std::filesystem::path out = argv[2];
  torch::manual_seed(1);
  tierflow::Layers layers;
  layers.add("embed", [] { return std::make_shared<Embed>(); })
      .repeat(kBlocks, "blocks", [] { return std::make_shared<Block>(); })
      .add("head", [] { return std::make_shared<Head>(); });
  tierflow::SessionOptions options{
      .device_memory = 16_MiB,
      .host_memory = 1_MiB,  // less than the state
      .storage = {argv[1]},
      .allow_buffered = true,  // so that the example runs on any file system; leave both out on a real drive
      .allow_any_filesystem = true,
      .micro_batch = kRows,
      .micro_batches = kMicroBatches,
      .sequence_length = kLength};
  {
    tierflow::Session session(layers.build(), options);
    for (int step = 0; step < 30; ++step) session.step(draw(5), 3e-3);
    std::printf("base: loss %.4f\n", loss_of(session, 5));
    session.export_hf(out / "base");
  }

  // with_base_format(base, WeightFormat::nf4_double) would store the base's linear layers in 4 bits.
  const tierflow::Model base = layers.load(out / "base");
  const tierflow::Model adapted =
      with_learning_rates(with_adapters(base, {.rank = 16, .alpha = 32}, /*seed=*/1), {{"lora_B", 4}});  // LoRA+
  tierflow::Session session(adapted, options);
  std::printf("%s\n", session.describe().c_str());
  const double before = loss_of(session, 11);
  for (int step = 0; step < 60; ++step) session.step(draw(11), 3e-3);
  const double after = loss_of(session, 11);
  std::printf("another rule: loss %.4f, with adapters %.4f\n", before, after);
  session.export_adapter(out / "adapter", out / "base");
  return after < 0.5 * before ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}

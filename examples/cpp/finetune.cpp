// Fine-tunes a Hugging Face model, its state in a storage folder, and writes it as such again:
//     finetune STORAGE MODEL OUT
// The data is random tokens that decide one another; exits with 1 where the loss did not fall.
#include <cstdio>
#include <exception>

#include "runtime/tierflow.h"

using namespace tierflow::literals;

namespace {

constexpr int kVocabulary = 64, kLength = 32, kRows = 8, kMicroBatches = 2, kSteps = 30;

std::vector<tierflow::MicroBatch> draw() {
  std::vector<tierflow::MicroBatch> batches;
  for (int i = 0; i < kMicroBatches; ++i) {
    const torch::Tensor ids = torch::randint(kVocabulary, {kRows, kLength}, torch::kInt64);
    batches.push_back({.ids = ids, .labels = (ids * 5 + 3) % kVocabulary});
  }
  return batches;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 4) {
    std::fprintf(stderr, "usage: finetune STORAGE MODEL OUT\n");
    return 2;
  }
  torch::manual_seed(1);
  const tierflow::SessionOptions options{
      .device_memory = 32_MiB,
      .host_memory = 1_MiB,
      .storage = {argv[1]},
      .allow_buffered = true,  // so that the example runs on any file system; leave both out on a real drive
      .allow_any_filesystem = true,
      .micro_batch = kRows,
      .micro_batches = kMicroBatches,
      .sequence_length = kLength};
  tierflow::Session session(tierflow::load(argv[2]), options, {.lr = 3e-3});
  double first = 0, last = 0;
  for (int step = 0; step < kSteps; ++step) {
    last = session.step(draw()).loss;
    if (step == 0) first = last;
  }
  std::printf("loss %.3f, after %d steps %.3f; %s\n", first, kSteps, last, session.describe().c_str());
  session.export_hf(argv[3]);
  return last < 0.8 * first ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}

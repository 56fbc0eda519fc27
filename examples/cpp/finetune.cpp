// Fine-tunes a Hugging Face model, its state in a storage folder, and writes it as such again:
//     finetune STORAGE MODEL OUT
// Every step is committed: after a crash the same command goes on where it was.
// The data is random tokens that decide one another; exits with 1 where the loss did not fall.
#include <cstdio>
#include <exception>
#include <string>

#include "runtime/tierflow.h"

using namespace tierflow::literals;

namespace {

constexpr int kVocabulary = 64, kLength = 32, kRows = 8, kMicroBatches = 2, kSteps = 30;

// The data of a step: the same whenever it is asked for.
std::vector<tierflow::MicroBatch> draw(std::int64_t step) {
  torch::manual_seed(1 + step);
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
  tierflow::SessionOptions options{
      .device_memory = 32_MiB,
      .host_memory = 1_MiB,
      .storage = {argv[1]},
      .allow_buffered = true,  // so that the example runs on any file system; leave both out on a real drive
      .allow_any_filesystem = true,
      .micro_batch = kRows,
      .micro_batches = kMicroBatches,
      .sequence_length = kLength,
      .commit_every = 1,
      .run = R"({"data": "random tokens of seed 1 + step, decided by id * 5 + 3"})"};  // another one is refused
  options.resume = tierflow::can_resume(options);
  tierflow::Session session(tierflow::load(argv[2]), options, {.lr = 3e-3});
  // The first loss goes with every commit.
  double first = session.remembered().empty() ? 0 : std::stod(session.remembered()), last = first;
  for (std::int64_t step = session.steps(); step < kSteps; ++step) {
    last = session.step(draw(step)).loss;
    if (first == 0) first = last;
    session.remember(std::to_string(first));
  }
  std::printf("loss %.3f, after step %d %.3f; %s\n", first, kSteps, last, session.describe().c_str());
  session.export_hf(argv[3]);
  session.discard();  // the result is there: nothing is to be gone on with
  return last < 0.8 * first ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}

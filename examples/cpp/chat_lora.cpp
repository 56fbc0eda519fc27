// Tunes adapters (LoRA) on conversations, beside a base in 4 bits that streams, and writes them as PEFT's folder:
//     tierflow data prepare --model MODEL --data chats.jsonl --out rows.tfd
//     chat_lora STORAGE MODEL rows.tfd OUT
// Exits with 1 where the loss on rows that were held out did not fall.
#include <algorithm>
#include <cstdio>
#include <exception>
#include <vector>

#include "runtime/tierflow.h"

using namespace tierflow::literals;

namespace {

constexpr int kLength = 128, kRows = 4, kMicroBatches = 2, kSteps = 40;

double held_out_loss(tierflow::Session& session, const tierflow::Dataset& data) {
  const std::int64_t rows = data.held_out_sequences();
  const auto batch = [&](std::int64_t index) {
    return tierflow::micro_batch(data, tierflow::Sequences::held_out, index * kRows,
                                 std::min<std::int64_t>(kRows, rows - index * kRows));
  };
  return session.evaluate((rows + kRows - 1) / kRows, batch).loss;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 5) {
    std::fprintf(stderr, "usage: chat_lora STORAGE MODEL ROWS OUT\n");
    return 2;
  }
  const tierflow::Model base = tierflow::with_base_format(tierflow::load(argv[2]), tierflow::WeightFormat::nf4_double);
  const tierflow::Dataset data = tierflow::Dataset::prepare(
      {.paths = {argv[3]}, .vocab_size = base.spec().config.vocab_size, .sequence_length = kLength, .held_out = 0.1});
  tierflow::Session session(tierflow::with_adapters(base, {.rank = 8, .alpha = 16}, /*seed=*/1),
                            {.device_memory = 64_MiB,
                             .host_memory = 8_MiB,
                             .storage = {argv[1]},
                             .allow_buffered = true,  // so that the example runs on any file system; leave both out
                             .allow_any_filesystem = true,  // on a real drive
                             .micro_batch = kRows,
                             .micro_batches = kMicroBatches,
                             .sequence_length = kLength},
                            {.lr = 1e-2});
  const double before = held_out_loss(session, data);
  for (std::int64_t step = 0; step < kSteps; ++step) {
    std::vector<tierflow::MicroBatch> batches;
    for (int i = 0; i < kMicroBatches; ++i)
      batches.push_back(
          tierflow::micro_batch(data, tierflow::Sequences::training, (step * kMicroBatches + i) * kRows, kRows));
    session.step(batches);
  }
  const double after = held_out_loss(session, data);
  std::printf("held-out loss %.3f, after step %d %.3f; %s\n", before, kSteps, after, session.describe().c_str());
  session.export_adapter(argv[4], argv[2]);
  return after < before ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}

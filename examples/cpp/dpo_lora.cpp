// Tunes adapters on pairs of answers (DPO) beside a base that streams. The reference is the base: each step computes it
// while a layer is there, so that the base is read as often as without one.
//     tierflow data prepare --model MODEL --data pairs.jsonl --data-format preference --out pairs.tfd
//     dpo_lora STORAGE MODEL pairs.tfd OUT
// Exits with 1 where the chosen answers of pairs that were held out did not gain on the rejected ones.
#include <algorithm>
#include <cstdio>
#include <exception>
#include <vector>

#include "runtime/tierflow.h"

using namespace tierflow::literals;

namespace {

constexpr int kLength = 128, kPairs = 2, kMicroBatches = 2, kSteps = 30;
constexpr std::int64_t kRows = 2 * kPairs;  // a pair is two rows, the chosen one first

tierflow::PairTotals held_out(tierflow::Session& session, const tierflow::Dataset& data) {
  const std::int64_t rows = data.held_out_sequences();
  const auto batch = [&](std::int64_t index) {
    return tierflow::micro_batch(data, tierflow::Sequences::held_out, index * kRows,
                                 std::min(kRows, rows - index * kRows));
  };
  tierflow::PairTotals totals;
  session.evaluate((rows + kRows - 1) / kRows, batch,
                   [&](std::int64_t, tierflow::MicroBatch pairs, const tierflow::HeadScores& scores) {
                     // With full fine-tuning in place of adapters, this is what row_log_probabilities(pairs,
                     // scores.losses) gave before the first step; step() then takes it in `reference`, too.
                     pairs.reference = tierflow::row_log_probabilities(pairs, scores.reference_losses);
                     totals.add(tierflow::pair_totals(session.options().loss, pairs, scores.losses));
                   });
  return totals;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 5) {
    std::fprintf(stderr, "usage: dpo_lora STORAGE MODEL PAIRS OUT\n");
    return 2;
  }
  const tierflow::Model base = tierflow::load(argv[2]);
  const tierflow::Dataset data = tierflow::Dataset::prepare({.paths = {argv[3]},
                                                             .vocab_size = base.spec().config.vocab_size,
                                                             .pairs = tierflow::Pairs::only,
                                                             .sequence_length = kLength,
                                                             .held_out = 0.1});
  tierflow::Session session(
      tierflow::without_dropout(tierflow::with_adapters(base, {.rank = 8, .alpha = 16}, /*seed=*/1)),
      {.device_memory = 64_MiB,
       .host_memory = 8_MiB,
       .storage = {argv[1]},
       .allow_buffered = true,        // so that the example runs on any file system; leave both out
       .allow_any_filesystem = true,  // on a real drive
       .loss = {.kind = tierflow::LossKind::dpo, .beta = 0.1, .base_is_reference = true},
       .micro_batch = kRows,
       .micro_batches = kMicroBatches,
       .sequence_length = kLength},
      {.lr = 5e-3});
  const double before = held_out(session, data).margin();
  for (std::int64_t step = 0; step < kSteps; ++step) {
    std::vector<tierflow::MicroBatch> batches;
    for (int i = 0; i < kMicroBatches; ++i)
      batches.push_back(
          tierflow::micro_batch(data, tierflow::Sequences::training, (step * kMicroBatches + i) * kRows, kRows));
    session.step(batches);
  }
  const tierflow::PairTotals after = held_out(session, data);
  std::printf("held-out margin %.3f, after step %d %.3f, %.0f%% of the pairs right; %s\n", before, kSteps,
              after.margin(), 100 * after.accuracy(), session.describe().c_str());
  session.export_adapter(argv[4], argv[2]);
  return after.margin() > before ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}

// What a session asks of micro-batches, and what it makes of them for its stages.
#include <algorithm>

#include "runtime/base/mix_bits.h"
#include "runtime/session/session_impl.h"

namespace tierflow {

std::vector<Shared> Session::Impl::share(const std::vector<MicroBatch>& batches) {
  if (torch_device.is_cuda()) expect_default_stream({c10::DeviceType::CUDA, 0});
  std::vector<Shared> shared;
  for (const MicroBatch& batch : batches) {
    shared.push_back(model->share(batch, torch_device));
    ask_of_head(shared.back(), batch, options);
    shared.back().attention.ran = &attention_ran;
    shared.back().watch.touched = &experts_touched;
  }
  return shared;
}

void Session::Impl::check_batches(const std::vector<MicroBatch>& batches, bool train, std::int64_t first) const {
  const auto wrong = [](const std::string& what) { fail_usage(what); };
  if (train && !options.train) wrong("the session was made for evaluation");
  if (train && static_cast<int>(batches.size()) != options.micro_batches)
    wrong("a step takes " + std::to_string(options.micro_batches) + " micro-batches, " +
          std::to_string(batches.size()) + " were given");
  const auto called = [&](std::size_t i) {
    return "micro-batch " + std::to_string(first + static_cast<std::int64_t>(i));
  };
  for (std::size_t i = 0; i < batches.size(); ++i) {
    const torch::Tensor &ids = batches[i].ids, &labels = batches[i].labels;
    if (!ids.defined() || !labels.defined() || ids.dim() != 2 || labels.sizes() != ids.sizes() ||
        ids.size(0) > options.micro_batch || ids.size(1) > options.sequence_length)
      wrong(called(i) + " is not what the session takes: ids and labels of one shape, of at most " +
            std::to_string(options.micro_batch) + " x " + std::to_string(options.sequence_length) + " tokens");
    if (ids.numel() == 0) wrong(called(i) + " has no tokens: leave it out");
    if (batches[i].teacher_ids.defined() != batches[i].teacher_log_probabilities.defined())
      wrong(called(i) + " has a teacher's tokens, or their log-probabilities, without the other");
  }
  for (const MicroBatch& batch : batches)
    if (!batch.lengths.empty() &&
        (static_cast<std::int64_t>(batch.lengths.size()) != batch.ids.size(0) ||
         std::ranges::any_of(batch.lengths, [&](std::int64_t n) { return n < 0 || n > batch.ids.size(1); })))
      wrong("a micro-batch's lengths are one for each row, of at most its " + std::to_string(batch.ids.size(1)) +
            " tokens");
  for (const MicroBatch& batch : batches) batch.documents();  // throws where positions are wrong
  for (std::size_t i = 0; i < batches.size(); ++i) check_tokens(batches[i], model->spec().config.vocab_size, called(i));
  if (!train || !options.loss.distills()) return;
  for (const MicroBatch& batch : batches) {
    std::vector<std::int64_t> shape = batch.ids.sizes().vec();
    shape.push_back(options.loss.distillation.top);
    for (const torch::Tensor& part : {batch.teacher_ids, batch.teacher_log_probabilities})
      if (!part.defined() || part.sizes() != torch::IntArrayRef(shape))
        wrong("the loss needs " + std::to_string(shape.back()) + " tokens of the teacher for each token");
  }
}

void Session::Impl::check_rows(const std::vector<CachedRow>& rows) const {
  if (rows.size() > static_cast<std::size_t>(options.micro_batches))
    fail_usage("a pass takes at most " + std::to_string(options.micro_batches) + " rows");
  for (const CachedRow& row : rows)
    if (row.ids.dim() != 2 || row.ids.size(0) != 1 || row.ids.size(1) > options.micro_batch * options.sequence_length)
      fail_usage("a row has at most " + std::to_string(options.micro_batch * options.sequence_length) + " tokens");
  for (std::size_t i = 0; i < rows.size(); ++i)
    check_tokens({.ids = rows[i].ids}, model->spec().config.vocab_size, "row " + std::to_string(i));
}

models::Seeded Session::Impl::seeded(int stage, int micro_batch, bool train) const {
  std::uint64_t key = mix_bits(options.seed + 0x9e3779b97f4a7c15ULL);
  for (const std::uint64_t part :
       {static_cast<std::uint64_t>(steps), static_cast<std::uint64_t>(micro_batch), static_cast<std::uint64_t>(stage)})
    key = mix_bits(key ^ (part + 0x9e3779b97f4a7c15ULL));
  return {train ? model->draws() : models::Draws::nothing, key, torch_device};
}

}  // namespace tierflow

// What leaves a Streamer: weights as safetensors, the state for a checkpoint, commits.
#include "runtime/checkpoint/safetensors.h"
#include "runtime/state/script_model.h"
#include "runtime/state/words_ahead.h"
#include "runtime/stream/stream_state.h"
#include "runtime/stream/streamer_impl.h"

namespace tierflow {

std::string Streamer::save(const std::filesystem::path& folder, const SavedParts& parts,
                           const std::vector<ExtraTensor>& extra, std::uint64_t shard_bytes, const Progress& progress) {
  Impl& impl = *impl_;
  finish_updates();
  std::vector<TensorHeader> headers = headers_of(impl.units, impl.plan.packed, parts);
  for (const ExtraTensor& tensor : extra) {
    const auto type = tensor.type;
    if (type != torch::kFloat32 && type != torch::kBFloat16 && type != torch::kFloat16)
      fail_usage(tensor.as.name + " is neither float32, bfloat16 nor float16: it cannot be saved");
    headers.push_back({.name = tensor.as.name,
                       .dtype = type == torch::kFloat32    ? Dtype::f32
                                : type == torch::kBFloat16 ? Dtype::bf16
                                                           : Dtype::f16,
                       .shape = tensor.as.shape,
                       .trained = false});  // a mask may hold infinities
  }
  CheckpointWriter writer(folder, std::move(headers), shard_bytes);
  write_weights(
      writer, impl.state->units(), impl.plan.packed, *impl.plan.layout,
      [&](int unit, int tensor) { return !parts[unit][tensor].empty(); },
      [&](std::span<const int> chunks, const auto& use) { impl.state->read_chunk(chunks.front(), use); }, "saving",
      progress);
  for (const ExtraTensor& tensor : extra) {
    const torch::Tensor values = tensor.values().detach().to(torch::kCPU, tensor.type).contiguous();
    writer.write({static_cast<const std::byte*>(values.data_ptr()), static_cast<std::size_t>(values.nbytes())});
  }
  writer.finish();
  return writer.not_finite();
}

void Streamer::Impl::between_steps(const char* what) const {
  for (int unit = 0; unit < static_cast<int>(units.size()); ++unit)
    if (planner->gradients_of(unit) != 0)
      fail_usage(std::string("training state is ") + what +
                 " between steps: call the optimizer's step() and zero_grad() first");
}

void Streamer::save_state(const std::filesystem::path& file, const Progress& progress) {
  impl_->between_steps("saved");
  finish_updates();
  save_stream_state(*impl_->state, file, progress);
}

void Streamer::load_state(const std::filesystem::path& file, const Progress& progress) {
  impl_->between_steps("loaded");
  finish_updates();
  load_stream_state(*impl_->state, file, progress);
  for (int unit = 0; unit < static_cast<int>(impl_->units.size()); ++unit) impl_->planner->changed(unit);
}

void Streamer::Impl::expect_durable() const {
  if (!options.durable) fail_usage("the state goes with the process: nothing of it is committed");
}

void Streamer::commit(const StreamerCommit& commit) {
  Impl& impl = *impl_;
  impl.expect_durable();
  impl.close_gradients();
  finish_updates();
  impl.stays = true;  // of a commit that fails nobody knows how far it came: nothing is removed
  throw_if(impl.executor().write_back());
  throw_if(impl.store->commit(keep_commit(*impl.store, impl.options, commit)));
  impl.planned_generation = impl.store->generation();
}

void Streamer::begin_commit(const StreamerCommit& commit) {
  Impl& impl = *impl_;
  end_commit();
  impl.close_gradients();
  for (int unit = 0; unit < static_cast<int>(impl.units.size()); ++unit) impl.finish_update(unit);
  impl.stays = true;
  impl.work->set_progress(keep_commit(*impl.store, impl.options, commit));
  impl.executor().append(impl.planner->commit(), impl.work);
  ++impl.planned_generation;
}

void Streamer::end_commit() {
  Impl& impl = *impl_;
  impl.expect_durable();
  if (impl.store->generation() == impl.planned_generation) return;
  impl.quiet();
  impl.check_updates();
}

bool Streamer::exports_beside() const {
  return impl_->plan.exporting != 0;
}

std::string Streamer::export_committed(const std::filesystem::path& folder, const Progress& progress) const {
  const Impl& impl = *impl_;
  impl.expect_durable();
  const ScriptModel model(committed_in(*impl.store, impl.options).beside, impl.units,
                          impl.options.storage.front().string());
  WordsAhead words(*impl.store, *impl.plan.layout, 0);
  return model.write(
      impl.units, impl.plan.packed, *impl.plan.layout, folder,
      [&](std::span<const int> chunks, const auto& use) { words.read(chunks, use); }, progress);
}

const std::optional<StreamerCommit>& Streamer::resumed() const {
  return impl_->resumed;
}

void Streamer::discard() {
  impl_->stays = false;
}

}  // namespace tierflow

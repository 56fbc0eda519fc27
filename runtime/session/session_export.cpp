// What comes out of a session: HF folders, master weights, a description.
#include <algorithm>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>

#include "runtime/base/files.h"
#include "runtime/base/machine.h"
#include "runtime/checkpoint/source_folder.h"
#include "runtime/planning/stored_model.h"
#include "runtime/session/adapter_folder.h"
#include "runtime/session/session_impl.h"
#include "runtime/session/window_sum.h"
#include "runtime/state/script_model.h"
#include "runtime/state/words_ahead.h"

namespace tierflow {

namespace {

// What a result takes from the folder of the model, beside what was trained; source null: nothing.
struct OtherParts {
  std::shared_ptr<const SourceFolder> source;
  std::uint64_t hash = 0;
};

std::vector<TensorHeader> headers_of(const ModelSpec& spec, const PackedModel& packed, const SourceFolder* source) {
  std::vector<TensorHeader> headers;
  for (std::size_t index = 0; index < packed.units.size(); ++index)
    for (const PackedTensor& tensor : packed.units[index].tensors) {
      const TensorSpec& of = spec.units[index].tensors[tensor.tensor];
      if (of.first_row == 0 && !is_adapter(of))  // its other tiles follow
        headers.push_back({.name = source == nullptr ? of.name : source->name_of(of),
                           .dtype = dtype_of(of),
                           .shape = of.checkpoint_shape(),
                           .trained = of.trainable || of.rewritten != Rewritten::never});
    }
  if (source != nullptr) std::ranges::move(source->headers(), std::back_inserter(headers));
  return headers;
}

std::string export_weights(const ModelSpec& spec, const PackedModel& packed, const swap::Layout& layout,
                           const OtherParts& others, const std::filesystem::path& folder, const ReadChunk& read,
                           const Progress& progress, const BeforeMove& before_move = {}) {
  CheckpointWriter writer(folder, headers_of(spec, packed, others.source.get()));
  if (before_move) writer.before_each_move(before_move);
  write_weights(
      writer, spec.units, packed, layout,
      [&](int unit, int tensor) { return !is_adapter(spec.units[unit].tensors[tensor]); }, read, "exporting", progress);
  if (others.source != nullptr) others.source->write(writer, others.hash, progress);
  writer.finish(others.source != nullptr ? others.source->config_json() : spec.config_json);
  return writer.not_finite();
}

// Those that a stored run's result takes, if they are still as they were.
OtherParts other_parts(const StoredModel& model, const Progress& progress) {
  if (!model.source) return {};
  const std::filesystem::path& folder = model.source->folder;
  const std::string wanted = "the result takes its parts beside the language model from there: put the model back";
  std::error_code ignored;
  if (!std::filesystem::is_directory(folder, ignored))
    fail_input(folder.string(), "is not there any more, and " + wanted);
  const ModelSpec spec = read_folder_spec(folder, Tiling::none(), model.spec.read_as);
  const auto checkpoint = std::make_shared<const Checkpoint>(Checkpoint::open(folder));
  check_tensors(spec, *checkpoint);
  OtherParts found{std::make_shared<const SourceFolder>(spec, checkpoint), model.source->hash};
  if (spec.config_json != model.spec.config_json || found.source->hash(progress) != found.hash)
    fail_input(folder.string(), "is not as it was when the run began, and " + wanted);
  return found;
}

// What parts of a stored run's embedding have missed; nothing where they have missed none.
std::optional<MissedUpdates> missed_by(const StoredModel& model, const std::string& where) {
  const auto progress = nlohmann::json::parse(model.store->progress(), nullptr, false);
  if (!progress.is_object() || !progress.contains("missed")) return std::nullopt;
  return MissedUpdates(*model.layout, progress.value("updates", std::int64_t{0}), progress.value("missed", ""), where);
}

void one_after_the_other(std::size_t count, const std::function<void(std::size_t)>& work) {
  for (std::size_t i = 0; i < count; ++i) work(i);
}

}  // namespace

std::string Session::export_hf(const std::filesystem::path& folder, const Progress& progress) {
  Impl& impl = *impl_;
  if (is_written_beside_base(impl.model->spec()))
    fail_usage("the base of a model with adapters is not trained: export_adapter() writes them");
  if (impl.model->spec().base_format != WeightFormat::bf16)
    fail_usage("the model's weights are quantised: as such they are not written");
  impl.flush();
  const ReadChunk words = [&](std::span<const int> chunks, const auto& use) {
    impl.state->read_chunk(chunks.front(), use);
  };
  return export_weights(
      impl.model->spec(), impl.plan.packed, *impl.plan.layout, {impl.source, impl.source_hash}, folder,
      impl.windows == 0 ? words : read_with_windows(impl.model->spec(), impl.state->extents()), progress);
}

std::shared_ptr<CommittedStep> Session::keep_step() {
  Impl& impl = *impl_;
  const bool whole = impl.model->spec().adapter_config_json.empty();
  if (!whole || impl.plan.exporting == 0 || impl.plan.commit_every == 0) return nullptr;
  if (!impl.kept_step.expired()) fail_usage("another step is kept already");
  const std::shared_ptr<CommittedStep> kept(new CommittedStep(impl));
  if (impl.steps == impl.committed_steps && !impl.missed->any()) kept->generation_ = impl.planned_generation;
  impl.kept_step = kept;
  return kept;
}

CommittedStep::CommittedStep(Session::Impl& impl) : impl_(impl), step_(impl.steps) {}

bool CommittedStep::durable() const {
  return generation_ != 0 && impl_.store->generation() >= generation_;
}

void CommittedStep::wait() {
  if (generation_ == 0) fail_usage("no step came after the one that is kept");
  impl_.flush();
}

std::string CommittedStep::export_hf(const std::filesystem::path& folder, const Progress& progress,
                                     const BeforeMove& before_move) const {
  if (!durable()) fail_usage("the step that is kept is not committed yet");
  WordsAhead words(*impl_.store, *impl_.plan.layout, 0);
  return export_weights(
      impl_.model->spec(), impl_.plan.packed, *impl_.plan.layout, {impl_.source, impl_.source_hash}, folder,
      [&](std::span<const int> chunks, const auto& use) { words.read(chunks, use); }, progress, before_move);
}

void Session::commit() {
  if (impl_->store == nullptr) fail_usage("the session has no storage: there is no state that outlives it");
  if (!impl_->kept_step.expired()) fail_usage("a step is kept: its commit has to stay the newest");
  impl_->expect_first_values();
  impl_->commit();
}

bool Session::Impl::commits_beside_next_step() const {
  // One that a kept step held back comes as soon as that is gone.
  return plan.commit_every != 0 && steps != committed_steps &&
         (steps % plan.commit_every == 0 || steps - committed_steps >= plan.commit_every);
}

void Session::Impl::commit() {
  committed = true;  // of a commit that fails nobody knows how far it came: nothing is removed
  flush();
  throw_if(executor().write_back());
  throw_if(store->commit(progress_json(steps)));
  committed_steps = steps;
  planned_generation = store->generation();
}

// What a session needs to go on from here, beside the weights and their state.
std::string Session::Impl::progress_json(std::int64_t after) const {
  nlohmann::json progress{{"step", after}, {"updates", updates_done}, {"skipped", skipped}, {"client", client}};
  if (windows != 0) progress["window"] = window_begun;
  if (missed->any()) progress["missed"] = missed->json();
  if (source != nullptr)
    progress["source"] =
        source_json({.folder = std::filesystem::absolute(source->folder()).lexically_normal(), .hash = source_hash});
  return progress.dump();
}

std::string export_store(const std::vector<std::filesystem::path>& storage, const std::filesystem::path& folder,
                         const Progress& progress, const std::filesystem::path& base, const std::string& base_weights) {
  const StoredModel model = open_stored_model(storage);
  const ModelExtents extents{.units = model.spec.units,
                             .packed = model.packed,
                             .layout = *model.layout,
                             .read = [&](swap::ExtentKind kind, int chunk, const auto& use) {
                               io::Buffer buffer = value_or_throw(model.store->fetch(kind, chunk));
                               use(buffer.bytes());
                             }};
  if (is_written_beside_base(model.spec))
    return write_adapter(model.spec, base, base_weights, folder,
                         [&](int unit, int tensor, const UseMaster& use) { read_master(extents, unit, tensor, use); });
  WordsAhead words(*model.store, *model.layout, 32 << 20);
  const std::optional<MissedUpdates> missed = missed_by(model, storage.front().string());
  const ReadChunk ahead = [&](std::span<const int> chunks, const auto& use) {
    const int chunk = chunks.front();
    words.read(chunks, [&](std::span<std::byte> bytes) {
      if (missed && missed->missed(chunk)) {
        io::Buffer state = value_or_throw(model.store->fetch(swap::ExtentKind::state, chunk));
        missed->replay(model.packed, model.layout->chunks()[chunk], bytes, state.bytes(), one_after_the_other);
      }
      use(bytes);
    });
  };
  if (const auto script = script_in(model, storage))
    return script->write(model.spec.units, model.packed, *model.layout, folder, ahead, progress);
  return export_weights(model.spec, model.packed, *model.layout, other_parts(model, progress), folder,
                        window_steps(model.spec) == 0 ? ahead : read_with_windows(model.spec, extents), progress);
}

std::vector<float> Session::master(int unit, int tensor) {
  Impl& impl = *impl_;
  const std::vector<UnitSpec>& units = impl.model->spec().units;
  if (unit < 0 || unit >= static_cast<int>(units.size()) || tensor < 0 ||
      tensor >= static_cast<int>(units[unit].tensors.size()))
    fail_usage("the model has no tensor " + std::to_string(tensor) + " of a unit " + std::to_string(unit));
  impl.flush();
  std::vector<float> values;
  values.reserve(units[unit].tensors[tensor].elements());
  impl.state->read_master(unit, tensor,
                          [&](std::span<const float> part) { values.insert(values.end(), part.begin(), part.end()); });
  return values;
}

std::vector<float> Session::master(const std::string& name) {
  const std::vector<UnitSpec>& units = impl_->model->spec().units;
  std::vector<float> values;
  for (std::size_t unit = 0; unit < units.size(); ++unit)
    for (std::size_t tensor = 0; tensor < units[unit].tensors.size(); ++tensor) {
      if (units[unit].tensors[tensor].name != name) continue;
      const auto part = master(static_cast<int>(unit), static_cast<int>(tensor));
      values.insert(values.end(), part.begin(), part.end());
    }
  if (values.empty()) fail_usage("the model has no tensor " + name);
  return values;
}

std::string Session::describe() const {
  const Impl& impl = *impl_;
  const auto mib = [](std::uint64_t bytes) { return std::to_string((bytes + (1 << 19)) >> 20) + " MiB"; };
  const std::uint64_t trainable_parameters = impl.plan.packed.trainable_parameters;
  const std::string trained = !impl.options.train || trainable_parameters == parameters()
                                  ? ""
                                  : ", " + human_count(static_cast<double>(trainable_parameters)) + " of them trained";
  const auto share = [&](const std::vector<bool>& resident, bool trainable = true) {
    std::uint64_t kept = 0, all = 0;
    for (std::size_t id = 0; id < resident.size(); ++id) {
      if (trainable && !impl.plan.layout->chunks()[id].trainable) continue;
      all += impl.plan.layout->chunks()[id].elements;
      if (resident[id]) kept += impl.plan.layout->chunks()[id].elements;
    }
    return std::to_string(all == 0 ? 0 : kept * 100 / all) + "%";
  };
  std::vector<bool> stays;  // on the device, by chunk
  for (const swap::Chunk& chunk : impl.plan.layout->chunks())
    stays.push_back(impl.plan.arrangement.word_place(chunk.unit) != swap::kNowhere);
  const int on_host = impl.plan.arrangement.inputs_that_leave();
  const auto keeping = impl.plan.arrangement.count(swap::Activations::keep);
  const auto swapping = impl.plan.arrangement.count(swap::Activations::swap);
  std::string text =
      human_count(static_cast<double>(parameters())) + " parameters" + trained +
      (impl.options.train ? std::string(", ") + precision_name(impl.options.precision) : "") +
      "; device: " + mib(impl.plan.arrangement.device_bytes()) + " of slots and " + mib(impl.plan.workspace) +
      " of workspace in " + mib(impl.options.device_memory) +
      (impl.options.train ? "" : ", " + share(stays, false) + " of the weights stay there") +
      (keeping == 0 ? "" : ", " + std::to_string(keeping) + " layers' micro-batches keep their activations") +
      (swapping == 0 ? "" : ", " + std::to_string(swapping) + " swap theirs") +
      "; host: " + mib(impl.plan.host_bytes()) + " of " + mib(impl.options.host_memory) + ", in it " +
      share(impl.plan.arrangement.hi_resident, false) + " of the weights" +
      (impl.plan.arrangement.cached_units == 0
           ? ""
           : ", and room for " + std::to_string(impl.plan.arrangement.cached_units) + " experts");
  if (impl.options.train) text += ", " + share(impl.plan.arrangement.state_resident) + " of the optimizer state";
  if (impl.plan.device_state_parameters != 0)
    text += " (" + std::to_string(impl.plan.device_state_parameters * 100 / trainable_parameters) +
            "% stays on the device)";
  if (impl.plan.arrangement.staged)
    text += ", " + share(impl.plan.arrangement.gradient_resident) + " of the staged gradients";
  if (impl.plan.speculates) text += "; no update waits for a norm that is likely not to clip";
  if (!impl.plan.arrangement.staged && impl.plan.defers())
    text += "; " + share(impl.plan.arrangement.deferred) + " of the updates wait for the next forward";
  if (on_host != 0) text += ", the boundary activations of " + std::to_string(on_host) + " layers";
  if (const CachePlacement& cache = impl.plan.cache; cache.host != 0) {
    const auto layers = cached_layers(impl.options.cache);
    text += ", keys and values of " + std::to_string(layers - cache.stored_layers()) + " of " + std::to_string(layers) +
            " layers (" + mib(cache.host) + ")";
    if (cache.storage != 0) text += "; those of the other layers on storage (" + mib(cache.storage) + ")";
  }
  if (impl.options.device != "cpu") {
    const std::string note = impl.executor().pin_note();
    text += "; " + (note.empty() ? "all of the host memory is pinned" : note);
  }
  if (impl.plan.commit_every == 1) text += "; every step is committed";
  if (impl.plan.commit_every > 1) text += "; every " + std::to_string(impl.plan.commit_every) + " steps are committed";
  if (!impl.plan.layout->sparse_chunks().empty())
    text += "; of the embedding a step moves and updates the parts that its tokens use";
  if (impl.store != nullptr) text += "; storage: " + mib(impl.store->storage_bytes());
  return text;
}

}  // namespace tierflow

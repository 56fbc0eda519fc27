#include "runtime/session/session.h"

#include <algorithm>
#include <cmath>

#include "runtime/base/mix_bits.h"
#include "runtime/base/seconds.h"
#include "runtime/session/schedule.h"
#include "runtime/session/session_impl.h"

namespace tierflow {
namespace {

// Turns what torch throws into an Exception and stops the executor, so that the session can be destroyed.
template <class Work>
auto guarded(swap::Executor& executor, Work work) {
  try {
    return work();
  } catch (const Exception& error) {
    executor.fail(error.error());
    throw;
  } catch (const c10::Error& error) {
    const io::Error failure =
        is_out_of_memory(error)
            ? out_of_memory_error(error)
            : io::Error{.kind = io::ErrorKind::usage, .operation = "compute", .detail = error.what_without_backtrace()};
    executor.fail(failure);
    throw Exception(failure);
  } catch (const NotMade&) {
    throw;
  } catch (...) {
    executor.fail(
        {.kind = io::ErrorKind::usage, .operation = "compute", .detail = "an exception ended the computation"});
    throw;
  }
}

}  // namespace

Session::Session(Model model, SessionOptions options, AdamW adamw, const Progress& progress, const Say& say)
    : impl_(std::make_unique<Impl>(std::move(model.layers), std::move(options), adamw)) {
  if (model.source != nullptr && impl_->options.train && !is_written_beside_base(impl_->model->spec()))
    impl_->keep_source(std::move(model.source), progress);
  impl_->set_up(model.weights, model.stored, progress, say);
}

Session::~Session() = default;

StepResult Session::step(const std::vector<MicroBatch>& batches, double lr) {
  check_learning_rate(lr);
  const PairCounts pairs = impl_->check_step(batches);
  const StepResult result = guarded(impl_->executor(), [&] {
    impl_->drain_ahead();
    return impl_->step(batches, pairs, lr);
  });
  impl_->throw_if_out_of_memory();
  return result;
}
StepResult Session::step(const std::vector<MicroBatch>& batches) {
  return step(batches, impl_->adamw.lr);
}
bool Session::waits_for_gradient() const {
  return impl_->waits_for_gradient();
}
void Session::begin_with_gradient(const std::vector<MicroBatch>& batches) {
  impl_->check_gradient_pass(batches);
  guarded(impl_->executor(), [&] {
    impl_->drain_ahead();
    impl_->begin_with_gradient(batches);
  });
  impl_->throw_if_out_of_memory();
}
Evaluation Session::evaluate(const std::vector<MicroBatch>& batches, const Scored& scored) {
  impl_->check_batches(batches, false);
  return impl_->evaluated(static_cast<std::int64_t>(batches.size()), [&](std::int64_t index) { return batches[index]; },
                          scored, {});
}
Evaluation Session::evaluate(std::int64_t count, const std::function<MicroBatch(std::int64_t index)>& make,
                             const Scored& scored, const Progress& progress) {
  const auto checked = [&](std::int64_t index) {
    MicroBatch batch = make(index);
    impl_->check_batches({batch}, false, index);
    return batch;
  };
  return impl_->evaluated(count, checked, scored, progress);
}
Evaluation Session::Impl::evaluated(std::int64_t count, const std::function<MicroBatch(std::int64_t index)>& make,
                                    const Scored& scored, const Progress& progress) {
  if (count < 1) fail_usage("there are no micro-batches: nothing can be evaluated");
  try {
    const Evaluation result = guarded(executor(), [&] { return evaluate(count, make, scored, progress); });
    throw_if_out_of_memory();
    return result;
  } catch (const NotMade& refused) {
    std::rethrow_exception(refused.why);
  }
}
std::vector<torch::Tensor> Session::next_logits(const std::vector<CachedRow>& rows, bool another) {
  impl_->check_rows(rows);
  auto logits = guarded(impl_->executor(), [&] { return impl_->next_logits(rows, another); });
  impl_->throw_if_out_of_memory();
  return logits;
}
const SessionOptions& Session::options() const {
  return impl_->options;
}
bool Session::intact() const {
  return !impl_->executor().failed();
}
std::uint64_t Session::skipped_steps() const {
  return impl_->skipped;
}
int Session::commit_every() const {
  return impl_->plan.commit_every;
}
std::int64_t Session::steps() const {
  return impl_->steps;
}
void Session::remember(std::string client) {
  impl_->client = std::move(client);
}
const std::string& Session::remembered() const {
  return impl_->client;
}
void Session::discard() {
  impl_->committed = false;
}
std::uint64_t Session::parameters() const {
  return static_cast<std::uint64_t>(impl_->model->spec().parameters());
}
std::array<swap::LaneCounters, swap::kLanes> Session::lanes() const {
  return impl_->executor().counters();
}
std::string Session::attention() const {
  std::string names;
  for (const std::string& name : impl_->attention_ran) names += (names.empty() ? "" : "+") + name;
  return names;
}
ExpertUse Session::expert_use() const {
  return impl_->expert_use;
}
std::vector<swap::TaskRecord> Session::take_timeline() {
  return impl_->executor().take_records();
}
const LayeredModel& Session::model() const {
  return *impl_->model;
}
const SessionPlan& Session::plan() const {
  return impl_->plan;
}

KeyValueStore* Session::key_values() const {
  return impl_->key_values.get();
}

std::optional<io::VolumeMode> Session::storage_mode() const {
  if (impl_->store == nullptr) return std::nullopt;
  return impl_->store->mode();
}

std::vector<io::DriveStats> Session::drives() const {
  return impl_->store == nullptr ? std::vector<io::DriveStats>{} : impl_->store->drives();
}

MemoryUse Session::memory() const {
  return {.device_budget = impl_->options.device_memory,
          .device_peak = impl_->plan.arrangement.device_bytes() + impl_->torch_memory.fixed() +
                         impl_->torch_memory.stats().peak_held,
          .host_budget = impl_->options.host_memory,
          .host_used = impl_->plan.host_bytes(),
          .storage_bytes = impl_->store == nullptr ? 0 : impl_->store->storage_bytes()};
}

std::uint64_t Session::bytes_written() const {
  std::uint64_t sum = impl_->copied;
  for (const io::DriveStats& drive : drives()) sum += drive.bytes_written;
  if (impl_->key_values != nullptr) sum += impl_->key_values->traffic().written;
  return sum;
}

std::uint64_t Session::bytes_written_after_next_step() const {
  return bytes_written() + impl_->writes_of_next_step();
}

void Session::Impl::expect_first_values() const {
  if (lacks_first_values) fail_usage("the adapters have no first values yet: begin_with_gradient() makes them");
}

PairCounts Session::Impl::check_step(const std::vector<MicroBatch>& batches) const {
  check_batches(batches, true);
  expect_first_values();
  if (c10::InferenceMode::is_enabled())
    fail_usage("a step is taken under c10::InferenceMode, where nothing is trained");
  if (window_ended() && window_tried != steps)
    fail_usage("the next window needs its projector first: begin_with_gradient() makes it of the step's gradient");
  return options.loss.pairs() ? count_pairs(options.loss, batches) : PairCounts{};
}

StepResult Session::Impl::step(const std::vector<MicroBatch>& batches, const PairCounts& pairs, double lr) {
  const auto started = std::chrono::steady_clock::now();
  const torch::NoGradGuard no_grad;
  const auto kept = kept_step.lock();
  bool commits = kept ? kept->step_ == steps && kept->generation_ == 0 : commits_beside_next_step();
  // It commits what it begins with; while a step is kept, nothing but that is committed.
  const bool speculates = next_is_likely_not_to_clip() && (commits || !kept);
  commits = commits || speculates;
  // A result is written of what is kept: all of it is up to date then.
  const bool catches_up = commits && kept;
  StepResult result{.step = ++steps};
  const std::vector<bool> used = chunks_of_tokens(batches, result.embedding_rows);
  if (plan.arrangement.staged) result.clipping = speculates ? Clipping::speculative : Clipping::staged;
  const std::int64_t again = computed_again;
  const std::uint64_t retries = torch_memory.stats().retries;
  const std::uint64_t left_out = gradient_bytes_left_out();
  std::int64_t targets = 0;
  std::vector<Shared> shared;
  compute(true, [&] {
    targets = 0;
    for (const MicroBatch& batch : batches) targets += batch.target_tokens();
    std::vector<MicroBatch> counted = batches;
    if (options.loss.pairs())
      for (MicroBatch& batch : counted) batch.labels = head_labels(options.loss, batch);
    shared = share(counted);
  });
  const Objective objective{.batches = batches, .targets = targets, .pairs = pairs};
  watch_balance(objective, shared);
  if (out_of_memory) {
    --steps;
    return result;
  }
  std::shared_ptr<OptimizerWork> work;
  const auto play = [&](swap::Updates updates) {
    work = make_work(lr);
    if (expert_places)
      work->set_zeros([this](const swap::Chunk& chunk) { return expert_places->untouched(chunk, experts_touched); });
    swap::SparseChunks sparse = take_sparse_chunks(used, catches_up);
    const auto behind = static_cast<std::uint64_t>(std::ranges::count(sparse.missed, true));
    work->set_progress(progress_json(steps - 1));
    swap::Plan planned = planner->train_step(pending, commits, updates, std::move(sparse));
    count_row_bytes(planned, result);
    executor().append(std::move(planned), work);
    if (std::exchange(commits, false)) {
      committed_steps = steps - 1;
      ++planned_generation;
      if (kept) kept->generation_ = planned_generation;
    }
    experts_touched.clear();
    expect_references(shared.size());
    forward_all(shared, swap::Pass::forward);
    result.loss = 0;
    if (options.loss.pairs()) result.pairs.emplace();
    if (options.loss.distills()) result.ce_loss = result.kd_loss = 0;
    head_all(shared, objective, result, *work);
    references.clear();
    backward_all(shared, *work);
    throw_if(executor().finish_updates());
    check_deferred(*work, behind);
    pending = false;
  };
  play(speculates ? swap::Updates::at_once : swap::Updates::as_arranged);
  if (speculates && !stands(*work)) {
    undo();
    result.clipping = Clipping::undone;
    if (!out_of_memory && work->finite()) play(swap::Updates::as_arranged);
  }
  if (out_of_memory) {
    drop_step(!plan.arrangement.staged && work->updated_at_once() != 0);
    return result;
  }
  for (const MicroBatch& batch : batches) result.tokens += batch.ids.numel();
  const auto divisor = static_cast<double>(std::max<std::int64_t>(targets, 1));
  result.loss = result.pairs ? result.pairs->mean_loss() : result.loss / divisor;
  result.ce_loss /= divisor;
  result.kd_loss /= divisor;
  if (!balanced.empty()) result.loss += model->spec().config.experts.balance * result.aux_loss;
  result.computed_again = computed_again - again;
  result.allocator_retries = torch_memory.stats().retries - retries;
  for (const auto& [block, experts] : experts_touched)
    result.experts_touched.push_back(std::ranges::count(experts, true));
  result.experts = model->spec().config.experts.count;
  result.gradient_bytes_left_out = gradient_bytes_left_out() - left_out;
  finish_step(result, *work, lr, used);
  result.seconds = seconds_since(started);
  result.tokens_per_s = static_cast<double>(result.tokens) / result.seconds;
  return result;
}

// After a step's computation and updates: what it amounts to.
void Session::Impl::finish_step(StepResult& result, const OptimizerWork& work, double lr,
                                const std::vector<bool>& used) {
  result.grad_norm = work.gradient_norm();
  result.skipped = !std::isfinite(result.loss) || !work.finite();
  const bool speculated = result.clipping == Clipping::speculative, undone = result.clipping == Clipping::undone;
  const std::uint64_t unused =
      sparse_parameters([&](int chunk) { return !used[chunk] && (speculated || !plan.arrangement.deferred[chunk]); });
  const std::uint64_t at_once =
      result.skipped ? 0 : plan.packed.trainable_parameters - (speculated ? 0 : plan.deferred_parameters) - unused;
  if (work.updated_at_once() != at_once && !(undone && result.skipped))
    throw Exception(io::ErrorKind::numeric, "step " + std::to_string(result.step) + " updated " +
                                                std::to_string(work.updated_at_once()) + " of " +
                                                std::to_string(at_once) + " parameters");
  pending = plan.defers() && !result.skipped && !speculated;
  if (norms) norms->add(result.grad_norm, undone);
  if (result.skipped) {
    ++skipped;
    return;
  }
  pending_step = ++updates_done;
  pending_lr = lr;
  pending_scale = clip_scale(result.grad_norm);
  add_update(used, speculated, lr);
}

// Memory ran out in this step: the model stands after the one before. torn: but for layers that are updated already.
void Session::Impl::drop_step(bool torn) {
  --steps;
  if (!torn) return;
  fail_with_more(
      *out_of_memory,
      "without clipping, other layers of this step are updated already: the state is torn; start again from the last "
      "export");
}

void Session::Impl::throw_if_out_of_memory() {
  if (out_of_memory) throw Exception(*std::exchange(out_of_memory, std::nullopt));
}

std::uint64_t Session::Impl::gradient_bytes_left_out() const {
  std::uint64_t bytes = 0;
  for (const swap::LaneCounters& lane : executor().counters()) bytes += lane.left_out;
  return bytes;
}

std::shared_ptr<OptimizerWork> Session::Impl::make_work(double lr) {
  const auto params = [&](std::int64_t step, double rate, double scale) {
    return optim::AdamWParams{.lr = static_cast<float>(rate),
                              .beta1 = static_cast<float>(adamw.beta1),
                              .beta2 = static_cast<float>(adamw.beta2),
                              .eps = static_cast<float>(adamw.eps),
                              .step = std::max<std::int64_t>(step, 1),
                              .gradient_scale = static_cast<float>(scale)};
  };
  std::vector<bool> owed = plan.arrangement.deferred;
  if (!pending) owed.assign(owed.size(), false);
  for (const int chunk : plan.layout->sparse_chunks()) owed[chunk] = owed[chunk] && sparse_waiting[chunk];
  auto work = std::make_shared<OptimizerWork>(plan.packed, *plan.layout, state->threads(), std::move(owed),
                                              plan.arrangement.staged, params(updates_done + 1, lr, 1.0),
                                              params(pending_step, pending_lr, pending_scale),
                                              static_cast<float>(adamw.weight_decay), mix_bits(options.seed));
  const std::uint64_t waiting_not =
      sparse_parameters([&](int chunk) { return plan.arrangement.deferred[chunk] && !sparse_waiting[chunk]; });
  work->expect(pending ? plan.deferred_parameters - waiting_not : 0, *missed);
  return work;
}

void Session::Impl::flush() {
  if (pending || missed->any()) {
    const auto work = make_work(pending_lr);
    swap::SparseChunks sparse = take_sparse_chunks({}, /*all=*/true);
    const auto behind = static_cast<std::uint64_t>(std::ranges::count(sparse.missed, true));
    executor().append(planner->flush(pending, std::move(sparse)), work);
    throw_if(executor().drain());
    check_deferred(*work, behind);
    pending = false;
  }
  ahead = true;
  drain_ahead();
}

void Session::Impl::drain_ahead() {
  if (std::exchange(ahead, false)) throw_if(executor().drain());
}

swap::Entered Session::Impl::enter(int stage, swap::Pass pass, int micro_batch) {
  if (micro_batch == 0) dense = {};  // the visit before's, whose memory this one takes
  return value_or_throw(executor().enter(stage, pass, micro_batch));
}

// All of a fresh gradient stands for zeros, what lies between its tensors included.
Gradients Session::Impl::gradients_of(const swap::Entered& entered, int micro_batch) const {
  const swap::Visit& visit = *entered.visit;
  const std::vector<int>& units = plan.layout->stages()[visit.stage].units;
  const auto floats = torch::TensorOptions().dtype(torch::kFloat32).device(torch_device);
  std::vector<torch::Tensor> sums = state->gradients(entered);
  std::vector<bool> fresh;
  for (std::size_t position = 0; micro_batch == 0 && position < units.size(); ++position) {
    const bool begins = visit.fresh_gradient[position];
    fresh.resize(fresh.size() + model->spec().units[units[position]].tensors.size(), begins);
    if (begins)
      begin_region(
          torch::from_blob(entered.arena + visit.gradients[position],
                           {static_cast<std::int64_t>(plan.layout->gradient_bytes(units[position]) / sizeof(float))},
                           floats),
          sums, products_overwrite(torch_device));
  }
  return gradients_on(torch_device, std::move(sums), std::move(fresh));
}

}  // namespace tierflow

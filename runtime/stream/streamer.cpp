#include "runtime/stream/streamer.h"

#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function_hook.h>

#include <algorithm>

#include "runtime/device/device_memory.h"
#include "runtime/models/dense_weights.h"
#include "runtime/planning/storage_volume.h"
#include "runtime/planning/store_cut.h"
#include "runtime/planning/with_room.h"
#include "runtime/stream/streamer_impl.h"

namespace tierflow {

Streamer::Streamer(std::vector<UnitSpec> units, std::vector<std::vector<int>> stages, const WeightSource& weights,
                   StreamerOptions options, const Progress& progress, const Say& say, const StoredSource& stored)
    : impl_(std::make_unique<Impl>(std::move(units), stages, std::move(options), progress, say)) {
  impl_->set_up(weights, stored, progress, say);
}

Streamer::~Streamer() = default;

StreamerPlan Streamer::Impl::make_plan(const std::vector<std::vector<int>>& stages, const Progress& progress,
                                       const Say& say) {
  StreamerOptions planned = options;
  const auto plan_with = [&](std::uint64_t chunk_elements) {
    planned.chunk_elements = chunk_elements;
    return StreamerPlan(units, stages, planned);
  };
  if (!left) return plan_with(options.chunk_elements);
  const io::VolumeOptions storage = volume_in(options, options.engine);
  StreamerPlan made = cut_for(plan_to_resume(left->chunk_elements, options.host_memory, plan_with), storage,
                              left->chunk_elements, plan_with, say, progress);
  left = value_or_throw(swap::Store::inspect(storage));  // a copy's generations have other numbers
  return made;
}

void Streamer::Impl::set_up(const WeightSource& weights, const StoredSource& stored, const Progress& progress,
                            const Say& say) {
  const swap::Layout& layout = *plan.layout;
  if (plan.needs_store(options)) make_store();
  state = std::make_unique<StreamedState>(
      units, plan.packed, layout, plan.arrangement, store.get(),
      StreamedState::Options{
          .device = options.device, .update_threads = options.update_threads, .chaos_seed = options.chaos_seed});
  planner = std::make_unique<swap::VisitPlanner>(layout, plan.arrangement);
  work = std::make_shared<StreamWork>(plan.packed, layout, state->threads(), options.seed);
  for (const UnitSpec& unit : units) touched.emplace_back(unit.tensors.size(), false);
  if (!left) return state->load(weights, stored, progress);
  state->restore(*store, progress);
  leave_note(options.storage, true);  // what it goes on with is whole
  resumed = committed_in(*store, options);
  planned_generation = store->generation();
  if (store->generation() < left->generation)
    say("generation " + std::to_string(left->generation) + " of the state in " + options.storage.front().string() +
        " is damaged: the run goes on from generation " + std::to_string(store->generation()) +
        ", which is whole, after step " + std::to_string(resumed->step));
}

void Streamer::Impl::make_store() {
  const swap::Layout& layout = *plan.layout;
  if (left) {
    stays = true;  // whatever comes
    const swap::StoreOptions wanted = plan.store_options(units, options, left->identity);
    store = value_or_throw(with_room([&] { return swap::Store::resume(wanted, layout); }));
    return;
  }
  const swap::StoreOptions wanted = plan.store_options(units, options);
  store = value_or_throw(with_room([&] { return swap::Store::create(wanted, layout); }));
  if (options.durable)
    leave_note(options.storage, true);
  else
    store->remove_files();  // their names: nothing is left of a process that is killed
}

void Streamer::Impl::check_turn(int stage, swap::Pass pass, const std::vector<bool>& gradients) const {
  const swap::Layout& layout = *plan.layout;
  const int stages = static_cast<int>(layout.stages().size());
  if (stage < 0 || stage >= stages)
    fail_usage("there is no stage " + std::to_string(stage) + ": stages are 0 to " + std::to_string(stages - 1));
  if (pass != swap::Pass::backward && pass != swap::Pass::head) return;
  const std::vector<int>& of_stage = layout.stages()[stage].units;
  if (gradients.size() != of_stage.size())
    fail_usage("stage " + std::to_string(stage) + " has " + std::to_string(of_stage.size()) + " units, and " +
               std::to_string(gradients.size()) + " values say which of them get gradients");
  for (std::size_t position = 0; position < of_stage.size(); ++position)
    if (gradients[position] && layout.trainable_chunks_of(of_stage[position]).empty())
      fail_usage(units[of_stage[position]].name + " is not trained and gets no gradients");
}

Weights Streamer::enter(int stage, swap::Pass pass, const std::vector<bool>& gradients, bool gradients_stay) {
  Impl& impl = *impl_;
  if (impl.turn.visit != nullptr) fail_usage("two streamed modules run at the same time: one calls the other");
  if (impl.torch_device.is_cuda()) expect_default_stream({c10::DeviceType::CUDA, 0});
  impl.check_turn(stage, pass, gradients);
  impl.executor().append(
      impl.planner->visit({.stage = stage, .pass = pass, .gradients = gradients, .gradients_stay = gradients_stay}),
      impl.work);
  impl.turn = value_or_throw(impl.executor().enter(stage, pass, 0));
  impl.open_sums();
  return models::dense_weights(impl.units, impl.plan.layout->stages()[stage].units, impl.state->weights(impl.turn));
}

void Streamer::Impl::open_sums() {
  const Gradients gradients = state->gradients(turn);
  const std::vector<int>& of_stage = plan.layout->stages()[turn.visit->stage].units;
  sums.clear();
  for (std::size_t position = 0; position < of_stage.size(); ++position)
    for (std::size_t tensor = 0; tensor < units[of_stage[position]].tensors.size(); ++tensor) {
      const torch::Tensor& values = gradients[sums.size()];
      sums.push_back({.unit = of_stage[position],
                      .tensor = static_cast<int>(tensor),
                      .values = values,
                      .fresh = turn.visit->fresh_gradient[position]});
    }
}

void Streamer::collect(const Weights& leaves) {
  struct Take final : torch::autograd::PostAccumulateGradHook {
    Take(Impl& impl_, std::size_t weight_) : impl(impl_), weight(weight_) {}
    void operator()(const torch::Tensor& leaf) override {
      const torch::NoGradGuard no_grad;
      if (impl.turn.visit != nullptr) impl.add(weight, leaf.grad());
      leaf.mutable_grad().reset();
    }
    Impl& impl;
    const std::size_t weight;
  };
  for (std::size_t i = 0; i < leaves.size(); ++i)
    if (leaves[i].requires_grad())
      torch::autograd::impl::set_post_acc_grad_hooks(leaves[i], std::make_unique<Take>(*impl_, i));
}

void Streamer::add(const Gradients& gradients) {
  const torch::NoGradGuard no_grad;
  if (impl_->turn.visit == nullptr) fail_usage("no turn is being taken");
  if (gradients.size() > impl_->sums.size())
    fail_usage(std::to_string(gradients.size()) + " gradients were given for the " +
               std::to_string(impl_->sums.size()) + " weights of a stage");
  for (std::size_t i = 0; i < gradients.size(); ++i)
    if (gradients[i].defined()) impl_->add(i, gradients[i]);
}

Gradients Streamer::sums(const Weights& leaves) {
  const torch::NoGradGuard no_grad;
  if (impl_->turn.visit == nullptr) fail_usage("no turn is being taken");
  std::vector<torch::Tensor> given(leaves.size());
  for (std::size_t i = 0; i < std::min(leaves.size(), impl_->sums.size()); ++i) {
    Sum& sum = impl_->sums[i];
    if (!sum.values.defined() || !leaves[i].requires_grad()) continue;
    if (sum.fresh) sum.values.zero_();
    sum.fresh = false;
    impl_->touched[sum.unit][sum.tensor] = true;
    given[i] = sum.values;
  }
  return given;
}

void Streamer::leave() {
  Impl& impl = *impl_;
  const torch::NoGradGuard no_grad;
  for (Sum& sum : impl.sums)
    if (sum.values.defined() && sum.fresh) sum.values.zero_();
  impl.sums.clear();
  impl.turn = {};
  throw_if(impl.executor().leave());
}

bool Streamer::inside() const {
  return impl_->turn.visit != nullptr;
}

bool Streamer::owns(const void* address) const {
  const swap::Entered& turn = impl_->turn;
  const auto* byte = static_cast<const std::byte*>(address);
  return turn.visit != nullptr && byte >= turn.arena && byte < turn.arena + impl_->plan.arrangement.device_bytes();
}

int Streamer::gradients_of(int unit) const {
  return impl_->planner->gradients_of(unit);
}
bool Streamer::touched(int unit, int tensor) const {
  return impl_->planner->gradients_of(unit) != 0 && impl_->touched[unit][tensor];
}

double Streamer::squares(int unit, int tensor) {
  impl_->close_gradients();
  throw_if(impl_->executor().finish_updates());
  return impl_->work->squares(unit, tensor);
}

bool Streamer::finite(int unit) {
  impl_->close_gradients();
  throw_if(impl_->executor().finish_updates());
  return impl_->work->finite(unit);
}

torch::Tensor Streamer::gradient(int unit, int tensor) {
  Impl& impl = *impl_;
  impl.close_gradients();
  impl.quiet();
  const torch::Tensor values = torch::zeros(impl.shape(unit, tensor), torch::kFloat32);
  const bool is_sum = impl.planner->is_sum(unit);
  std::vector<std::uint16_t> high(values.numel()), low(is_sum ? values.numel() : 0);
  const auto read = [&](swap::ExtentKind kind, std::vector<std::uint16_t>& words) {
    impl.state->read_words(unit, tensor, kind, words.data());
  };
  read(swap::ExtentKind::gradient, high);
  if (is_sum) read(swap::ExtentKind::gradient_low, low);
  float* out = values.data_ptr<float>();
  for (std::size_t i = 0; i < high.size(); ++i) out[i] = sum_value(high[i], is_sum ? low[i] : std::uint16_t{0});
  return values;
}

void Streamer::drop_gradient(int unit) {
  impl_->planner->drop(unit);
  std::fill(impl_->touched[unit].begin(), impl_->touched[unit].end(), false);
}

void Streamer::forget(int unit, int tensor) {
  impl_->touched[unit][tensor] = false;
}

void Streamer::step(std::vector<std::pair<int, std::vector<TensorUpdate>>> updates) {
  Impl& impl = *impl_;
  for (const auto& [unit, how] : updates)
    if (unit < 0 || unit >= static_cast<int>(impl.units.size()) || how.size() != impl.units[unit].tensors.size())
      fail_usage("a step names unit " + std::to_string(unit) + " with updates of " + std::to_string(how.size()) +
                 " tensors: no unit is like that");
  impl.close_gradients();
  std::vector<int> units;
  for (auto& [unit, how] : updates) {
    impl.finish_update(unit);  // one at a time is owed
    units.push_back(unit);
  }
  throw_if(impl.executor().finish_updates());
  for (auto& [unit, how] : updates) {
    impl.work->set_updates(unit, std::move(how));
    std::fill(impl.touched[unit].begin(), impl.touched[unit].end(), false);
  }
  impl.executor().append(impl.planner->owe(units), impl.work);
}

void Streamer::finish_updates() {
  Impl& impl = *impl_;
  for (int unit = 0; unit < static_cast<int>(impl.units.size()); ++unit) impl.finish_update(unit);
  impl.quiet();
  impl.check_updates();
}

torch::Tensor Streamer::read(int unit, int tensor, bool master) {
  Impl& impl = *impl_;
  impl.finish_update(unit);
  impl.quiet();
  const bool stored = impl.units[unit].tensors[tensor].format != WeightFormat::bf16;
  if (master || stored) {
    const torch::Tensor values = torch::empty(impl.shape(unit, tensor), torch::kFloat32);
    auto* next = values.data_ptr<float>();
    impl.state->read_master(unit, tensor,
                            [&](std::span<const float> part) { next = std::copy(part.begin(), part.end(), next); });
    return master ? values : values.to(torch::kBFloat16);
  }
  const torch::Tensor words = torch::empty(impl.shape(unit, tensor), torch::kBFloat16);
  impl.state->read_words(unit, tensor, swap::ExtentKind::hi, reinterpret_cast<std::uint16_t*>(words.data_ptr()));
  return words;
}

void Streamer::write(int unit, int tensor, const torch::Tensor& values) {
  Impl& impl = *impl_;
  if (values.sizes() != torch::IntArrayRef(impl.shape(unit, tensor)))
    fail_usage("the shape of " + impl.units[unit].tensors[tensor].name + " cannot change");
  expect_plain(impl.units[unit].tensors[tensor], "written");
  impl.finish_update(unit);
  impl.quiet();
  const torch::Tensor floats = values.detach().to(torch::kCPU, torch::kFloat32).contiguous();
  impl.state->write(unit, tensor, floats.data_ptr<float>());
  impl.planner->changed(unit);
}

MemoryUse Streamer::memory() const {
  return {.device_budget = impl_->options.device_memory,
          .device_peak = impl_->plan.arrangement.device_bytes(),
          .host_budget = impl_->options.host_memory,
          .host_used = impl_->plan.host_bytes(),
          .storage_bytes = impl_->store == nullptr ? 0 : impl_->store->storage_bytes()};
}

std::array<swap::LaneCounters, swap::kLanes> Streamer::lanes() const {
  return impl_->executor().counters();
}
std::optional<io::VolumeMode> Streamer::storage_mode() const {
  if (impl_->store == nullptr) return std::nullopt;
  return impl_->store->mode();
}
std::uint64_t Streamer::departures() const {
  return impl_->planner->departures();
}

}  // namespace tierflow

#include "runtime/stream/streamer.h"

#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function_hook.h>

#include <algorithm>

#include "runtime/base/exception.h"
#include "runtime/checkpoint/safetensors.h"
#include "runtime/device/device_memory.h"
#include "runtime/models/dense_weights.h"
#include "runtime/stream/stream_state.h"
#include "runtime/stream/streamer_shapes.h"
#include "swap/visit_planner.h"

namespace tierflow {

// Where a turn's gradient of one tensor adds up, on the device.
struct Sum {
  int unit = 0, tensor = 0;
  torch::Tensor values;  // fp32; undefined where the turn takes no gradient
  bool fresh = true;     // holds nothing yet

  void add(const torch::Tensor& gradient) {
    fresh ? values.copy_(gradient) : values.add_(gradient);
    fresh = false;
  }
};

struct Streamer::Impl {
  Impl(std::vector<UnitSpec> units_, const std::vector<std::vector<int>>& turns, StreamerOptions options_)
      : units(std::move(units_)),
        options(std::move(options_)),
        torch_device(options.device == "cuda" ? torch::kCUDA : torch::kCPU),
        shapes(units, turns, options) {}

  void set_up(const WeightSource& weights, const Progress& progress);
  // Everything planned is done, nothing runs: extents may be accessed.
  void quiet() {
    if (turn.visit != nullptr)
      throw Exception(io::ErrorKind::usage,
                      "a streamed parameter or gradient was read or written while another module runs: do it before or "
                      "after forward() and backward()");
    throw_if(executor().drain());
  }
  void open_sums();
  void add(std::size_t weight, const torch::Tensor& gradient) {
    Sum& sum = sums.at(weight);
    if (!sum.values.defined()) return;
    sum.add(gradient);
    touched[sum.unit][sum.tensor] = true;
  }
  // What a broken-off step left on the device joins its sum.
  void close_kept() {
    if (planner->keeps()) executor().append(planner->close(), work);
  }
  void finish_update(int unit) {
    if (planner->owes(unit)) executor().append(planner->settle(unit), work);
  }
  const std::vector<std::int64_t>& shape(int unit, int tensor) const { return units[unit].tensors[tensor].shape; }
  void between_steps(const char* what) const;
  void expect_plain(int unit, int tensor, const char* done) const {
    const TensorSpec& spec = units[unit].tensors[tensor];
    if (spec.format != WeightFormat::bf16)
      throw Exception(io::ErrorKind::usage, spec.name + " is stored as " + weight_format_name(spec.format) +
                                                ", which is not " + done + ": use the model that it came from");
  }
  void check_updates() const {
    if (work->asked() != work->updated())
      throw Exception(io::ErrorKind::numeric, "updates reached " + std::to_string(work->updated()) + " of " +
                                                  std::to_string(work->asked()) + " parameters");
  }

  const std::vector<UnitSpec> units;
  const StreamerOptions options;
  const torch::Device torch_device;
  StreamShapes shapes;  // packing, layout, arrangement
  swap::Executor& executor() const { return state->executor(); }
  std::unique_ptr<swap::Store> store;
  std::unique_ptr<swap::VisitPlanner> planner;
  std::shared_ptr<StreamWork> work;
  std::unique_ptr<StreamedState> state;    // last: drains before the rest goes
  swap::Entered turn;                      // visit: null outside of turns
  std::vector<Sum> sums;                   // of the turn, a weight each
  std::vector<std::vector<bool>> touched;  // by unit and tensor
};

Streamer::Streamer(std::vector<UnitSpec> units, std::vector<std::vector<int>> turns, const WeightSource& weights,
                   StreamerOptions options, const Progress& progress)
    : impl_(std::make_unique<Impl>(std::move(units), turns, std::move(options))) {
  impl_->set_up(weights, progress);
}

Streamer::~Streamer() = default;

void Streamer::Impl::set_up(const WeightSource& weights, const Progress& progress) {
  const swap::Layout& layout = *shapes.layout;
  if (shapes.needs_store()) {
    store = value_or_throw(swap::Store::create(shapes.store_options(options), layout));
    store->remove_files();  // their names: nothing is left of a process that is killed
  }
  state = std::make_unique<StreamedState>(
      units, shapes.packed, layout, shapes.arrangement, store.get(),
      StreamedState::Options{
          .device = options.device, .update_threads = options.update_threads, .chaos_seed = options.chaos_seed});
  planner = std::make_unique<swap::VisitPlanner>(layout, shapes.arrangement);
  work = std::make_shared<StreamWork>(shapes.packed, layout, state->threads(), options.seed);
  for (const UnitSpec& unit : units) touched.emplace_back(unit.tensors.size(), false);
  state->load(weights, {}, progress);
}

Weights Streamer::enter(int turn, swap::Pass pass, const std::vector<bool>& gradients, bool keep) {
  Impl& impl = *impl_;
  if (impl.turn.visit != nullptr)
    throw Exception(io::ErrorKind::usage, "two streamed modules run at the same time: one calls the other");
  if (impl.torch_device.is_cuda()) expect_default_stream({c10::DeviceType::CUDA, 0});
  impl.executor().append(impl.planner->visit({.stage = turn, .pass = pass, .gradients = gradients, .keep = keep}),
                         impl.work);
  impl.turn = value_or_throw(impl.executor().enter(turn, pass, 0));
  impl.open_sums();
  Weights weights = impl.state->weights(impl.turn);
  std::size_t index = 0;
  for (const int unit : impl.shapes.layout->stages()[impl.turn.visit->stage].units)
    for (const TensorSpec& tensor : impl.units[unit].tensors) {
      torch::Tensor& weight = weights[index++];
      if (tensor.format != WeightFormat::bf16 && weight.defined())
        weight = models::dense(weight, tensor.format, tensor.shape);
    }
  return weights;
}

void Streamer::Impl::open_sums() {
  const swap::Visit& visit = *turn.visit;
  const auto floats = torch::TensorOptions().dtype(torch::kFloat32).device(torch_device);
  sums.clear();
  for (std::size_t position = 0; position < visit.gradients.size(); ++position) {
    const int unit = shapes.layout->stages()[visit.stage].units[position];
    const std::size_t first = sums.size();
    for (std::size_t tensor = 0; tensor < units[unit].tensors.size(); ++tensor)
      sums.push_back({.unit = unit, .tensor = static_cast<int>(tensor), .fresh = visit.fresh_gradient[position]});
    if (visit.gradients[position] == swap::kNowhere) continue;
    for (const PackedTensor& tensor : shapes.packed.units[unit].tensors)
      if (units[unit].tensors[tensor.tensor].trainable)
        sums[first + tensor.tensor].values = torch::from_blob(
            turn.arena + visit.gradients[position] + 4 * tensor.offset, shape(unit, tensor.tensor), floats);
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
  if (impl_->turn.visit == nullptr) throw Exception(io::ErrorKind::usage, "no turn is being taken");
  for (std::size_t i = 0; i < gradients.size(); ++i)
    if (gradients[i].defined()) impl_->add(i, gradients[i]);
}

Gradients Streamer::sums(const Weights& leaves) {
  const torch::NoGradGuard no_grad;
  if (impl_->turn.visit == nullptr) throw Exception(io::ErrorKind::usage, "no turn is being taken");
  Gradients given(leaves.size());
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
  return turn.visit != nullptr && byte >= turn.arena && byte < turn.arena + impl_->shapes.arrangement.device_bytes();
}

int Streamer::gradients_of(int unit) const {
  return impl_->planner->gradients_of(unit);
}
bool Streamer::touched(int unit, int tensor) const {
  return impl_->planner->gradients_of(unit) != 0 && impl_->touched[unit][tensor];
}

double Streamer::squares(int unit, int tensor) {
  impl_->close_kept();
  throw_if(impl_->executor().finish_updates());
  return impl_->work->squares(unit, tensor);
}

bool Streamer::finite(int unit) {
  impl_->close_kept();
  throw_if(impl_->executor().finish_updates());
  return impl_->work->finite(unit);
}

torch::Tensor Streamer::gradient(int unit, int tensor) {
  Impl& impl = *impl_;
  impl.close_kept();
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
  impl.close_kept();
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

void Streamer::settle() {
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
    throw Exception(io::ErrorKind::usage, "the shape of " + impl.units[unit].tensors[tensor].name + " cannot change");
  impl.expect_plain(unit, tensor, "written");
  impl.finish_update(unit);
  impl.quiet();
  const torch::Tensor floats = values.detach().to(torch::kCPU, torch::kFloat32).contiguous();
  impl.state->write(unit, tensor, floats.data_ptr<float>());
  impl.planner->changed(unit);
}

void Streamer::save(const std::filesystem::path& folder, const SavedParts& parts, const std::vector<ExtraTensor>& extra,
                    std::uint64_t shard_bytes, const Progress& progress) {
  Impl& impl = *impl_;
  settle();
  std::vector<TensorHeader> headers;
  for (std::size_t unit = 0; unit < impl.units.size(); ++unit)
    for (const PackedTensor& tensor : impl.shapes.packed.units[unit].tensors) {
      std::uint64_t elements = 0;
      for (const SavedPart& part : parts.at(unit).at(tensor.tensor)) {
        headers.push_back({.name = part.name, .dtype = Dtype::bf16, .shape = part.shape});
        elements += static_cast<std::uint64_t>(c10::multiply_integers(part.shape));
      }
      if (elements != 0) impl.expect_plain(static_cast<int>(unit), tensor.tensor, "saved");
      if (elements != 0 && elements != tensor.elements)
        throw Exception(io::ErrorKind::usage,
                        impl.units[unit].tensors[tensor.tensor].name + " is saved in parts that are not the whole");
    }
  for (const ExtraTensor& tensor : extra) {
    const auto type = tensor.type;
    if (type != torch::kFloat32 && type != torch::kBFloat16 && type != torch::kFloat16)
      throw Exception(io::ErrorKind::usage,
                      tensor.as.name + " is neither float32, bfloat16 nor float16: it cannot be saved");
    headers.push_back({.name = tensor.as.name,
                       .dtype = type == torch::kFloat32    ? Dtype::f32
                                : type == torch::kBFloat16 ? Dtype::bf16
                                                           : Dtype::f16,
                       .shape = tensor.as.shape});
  }
  CheckpointWriter writer(folder, std::move(headers), shard_bytes);
  write_weights(
      writer, impl.state->units(), impl.shapes.packed, *impl.shapes.layout,
      [&](int unit, int tensor) { return !parts[unit][tensor].empty(); },
      [&](int chunk, const auto& use) { impl.state->read_chunk(chunk, use); }, "saving", progress);
  for (const ExtraTensor& tensor : extra) {
    const torch::Tensor values = tensor.values().detach().to(torch::kCPU, tensor.type).contiguous();
    writer.write({static_cast<const std::byte*>(values.data_ptr()), static_cast<std::size_t>(values.nbytes())});
  }
  writer.finish();
}

void Streamer::Impl::between_steps(const char* what) const {
  for (int unit = 0; unit < static_cast<int>(units.size()); ++unit)
    if (planner->gradients_of(unit) != 0)
      throw Exception(io::ErrorKind::usage, std::string("training state is ") + what +
                                                " between steps: call the optimizer's step() and zero_grad() first");
}

void Streamer::save_state(const std::filesystem::path& file, const Progress& progress) {
  impl_->between_steps("saved");
  settle();
  save_stream_state(*impl_->state, file, progress);
}

void Streamer::load_state(const std::filesystem::path& file, const Progress& progress) {
  impl_->between_steps("loaded");
  settle();
  load_stream_state(*impl_->state, file, progress);
  for (int unit = 0; unit < static_cast<int>(impl_->units.size()); ++unit) impl_->planner->changed(unit);
}

MemoryUse Streamer::memory() const {
  return {.device_budget = impl_->options.device_memory,
          .device_peak = impl_->shapes.arrangement.device_bytes(),
          .host_budget = impl_->options.host_memory,
          .host_used = impl_->shapes.arrangement.host_bytes(*impl_->shapes.layout) + impl_->shapes.loading,
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

// How a session comes to be: measure what a stage needs, arrange the budgets, make the store, fill it.
#include <map>
#include <nlohmann/json.hpp>

#include "runtime/chunk_io.h"
#include "runtime/session_impl.h"

namespace tierflow {
namespace {

constexpr std::uint64_t kCarryAlign = 256;

template <class Tensors>
std::uint64_t bytes_of(const Tensors& tensors) {
  std::uint64_t bytes = 0;
  for (const torch::Tensor& tensor : tensors)
    if (tensor.defined()) bytes += tensor.nbytes();
  return bytes;
}

// In 10^12 bytes, rounded up to what an option reads back as no less.
std::string terabytes(std::uint64_t bytes) {
  std::string digits = std::to_string(bytes / 1'000'000 + 1);
  if (digits.size() < 7) digits.insert(0, 7 - digits.size(), '0');
  return digits.insert(digits.size() - 6, ".");
}

}  // namespace

Session::Impl::Impl(std::shared_ptr<LayeredModel> model_, SessionOptions options_, AdamW adamw_)
    : model(std::move(model_)),
      options(std::move(options_)),
      adamw(adamw_),
      torch_device(options.device == "cuda" ? torch::kCUDA : torch::kCPU),
      torch_memory(options.device == "cuda" ? DeviceMemory::cuda() : DeviceMemory::install()),
      packed(pack(model->spec(), options.precision)),
      threads(options.update_threads > 0 ? options.update_threads : at::get_num_threads()) {}

void Session::Impl::set_up(const WeightSource& weights, const Progress& progress) {
  if (options.micro_batch < 1 || options.micro_batches < 1 || options.sequence_length < 1)
    throw Exception(io::ErrorKind::usage, "--micro-batch, --micro-batches and --sequence-length are at least 1");
  workspace = probe_workspace();

  std::vector<swap::UnitShape> shapes;
  for (const PackedUnit& unit : packed.units) shapes.push_back(unit.shape);
  std::vector<swap::StageShape> stages = packed.stages;
  for (std::size_t stage = 1; stage < stages.size(); ++stage)
    if (const auto& shapes_of = carry_shapes[stage];
        !shapes_of.empty() && model->spec().stages[stage].backward_needs_input)
      stages[stage].carry_bytes = swap::round_up(shapes_of.back().offset + shapes_of.back().bytes, swap::kSector);
  const std::uint64_t chunk_elements =
      options.chunk_elements != 0 ? options.chunk_elements : chunk_elements_for(options.host_memory);
  layout = std::make_unique<swap::Layout>(std::move(shapes), std::move(stages), chunk_elements);
  arrangement = value_or_throw(swap::arrange(*layout, {.host_budget = options.host_memory,
                                                       .device_budget = options.device_memory,
                                                       .workspace = workspace + torch_memory.fixed(),
                                                       .micro_batches = options.micro_batches,
                                                       .staged = options.clip.has_value(),
                                                       .storage = !options.storage.empty(),
                                                       .train = options.train}));
  device = options.device == "cuda" ? value_or_throw(swap::open_cuda_device(0))
                                    : swap::open_cpu_device({.chaos_seed = options.chaos_seed});

  const auto any = [](const std::vector<bool>& flags) {
    return std::find(flags.begin(), flags.end(), true) != flags.end();
  };
  std::vector<bool> stored(layout->chunks().size());
  for (std::size_t id = 0; id < stored.size(); ++id)
    stored[id] = !arrangement.hi_resident[id] ||
                 (options.train && layout->chunks()[id].trainable && !arrangement.state_resident[id]);
  if (any(stored) || options.keep_store) {
    count_writes();
    swap::StoreOptions store_options{.volume = {.directories = options.storage,
                                                .engine = options.engine,
                                                .allow_buffered = options.allow_buffered,
                                                .allow_any_filesystem = options.allow_any_filesystem,
                                                .measure_speeds = options.storage.size() > 1,
                                                .write_limit = options.write_limit,
                                                .on_notice = options.on_notice},
                                     .staged_gradients = arrangement.staged,
                                     .identity = store_identity(model->spec(), options.precision)};
    store = value_or_throw(swap::Store::create(std::move(store_options), *layout));
  }
  executor = value_or_throw(swap::Executor::create(*device, store.get(), *layout, arrangement,
                                                   {.chaos_seed = options.chaos_seed, .record = options.record}));
  planner = std::make_unique<swap::Planner>(*layout, arrangement);
  torch_memory.release_kept();
  torch_memory.set_cap(options.device_memory - arrangement.device_bytes() - torch_memory.fixed());
  torch_memory.reset_peak();
  try {
    load(weights, progress);
  } catch (...) {
    executor.reset();
    if (store != nullptr) store->volume().remove_files();
    throw;
  }
}

void Session::Impl::count_writes() {
  for (std::size_t id = 0; id < layout->chunks().size(); ++id) {
    const swap::Chunk& chunk = layout->chunks()[id];
    const bool trained = options.train && chunk.trainable;
    const auto extent = [&](bool resident, std::uint64_t bytes, bool updated) {
      (resident ? writes.commit : writes.load) += bytes;
      if (!resident && updated) writes.update += bytes;
    };
    extent(arrangement.hi_resident[id], chunk.word_bytes(), trained);
    if (!trained) continue;
    extent(arrangement.state_resident[id], chunk.state_bytes, true);
    if (arrangement.staged && !arrangement.gradient_resident[id]) writes.gradients += chunk.word_bytes();
  }
  if (!options.keep_store) writes.commit = 0;
  const std::uint64_t least = writes.load + writes_of_next_step();
  if (options.write_limit != 0 && least > options.write_limit)
    throw Exception(io::ErrorKind::usage, "--max-tb-written allows no step: loading writes " +
                                              std::to_string(writes.load) + " bytes to storage and a step " +
                                              std::to_string(least - writes.load) + "; the smallest that works is " +
                                              terabytes(least));
}

// Runs one stage on weights, and gradients where it has some, of its own: raises `most` to what that takes beside them.
template <class Work>
auto Session::Impl::probe_stage(int stage, bool backward, std::uint64_t& most, Work work) {
  const auto on_device = torch::TensorOptions().device(torch_device);
  torch_memory.release_kept();  // blocks of the stage before, which this one may not be able to reuse
  Weights weights;
  Gradients gradients;
  for (int unit : model->spec().stages[stage].units)
    for (const TensorSpec& tensor : model->spec().units[unit].tensors) {
      weights.push_back(torch::zeros(tensor.shape, on_device.dtype(torch::kBFloat16)));
      const bool trained = backward && model->spec().units[unit].trainable;
      gradients.push_back(trained ? torch::zeros(tensor.shape, on_device.dtype(torch::kFloat32)) : torch::Tensor());
    }
  const std::uint64_t fixed = torch_memory.stats().used;
  torch_memory.reset_peak();
  auto out = work(weights, gradients);
  most = std::max(most, torch_memory.stats().peak_used - fixed);
  return out;
}

// What a step takes beside weights, gradients and saved carries: measured on one micro-batch, forward and backward,
// once for each kind of stage. Stages of one kind have the same tensors and the same input.
std::uint64_t Session::Impl::measure_workspace() {
  using Kind = std::vector<std::vector<std::int64_t>>;
  const std::vector<StageSpec>& stages = model->spec().stages;
  const int last = static_cast<int>(stages.size()) - 1;
  const auto ids = torch::zeros({options.micro_batch, options.sequence_length},
                                torch::TensorOptions().device(torch_device).dtype(torch::kInt64));
  const Shared shared = model->share({.ids = ids, .labels = ids}, torch_device);
  std::uint64_t most = 0, carry_bytes = 0;
  std::vector<Kind> kinds;
  std::vector<Carry> inputs(1);
  std::map<Kind, Carry> seen;
  carry_shapes.clear();
  for (int stage = 0; stage <= last; ++stage) {
    kinds.push_back({{static_cast<std::int64_t>(stages[stage].kind), stage == 0 ? 0 : stage == last ? 2 : 1}});
    for (int unit : stages[stage].units)
      for (const TensorSpec& tensor : model->spec().units[unit].tensors) kinds[stage].push_back(tensor.shape);
    std::uint64_t offset = 0;
    carry_shapes.emplace_back();
    for (const torch::Tensor& part : inputs[stage]) {
      kinds[stage].push_back(part.sizes().vec());
      carry_shapes.back().push_back(
          {.shape = part.sizes().vec(), .dtype = part.scalar_type(), .bytes = part.nbytes(), .offset = offset});
      offset += swap::round_up(part.nbytes(), kCarryAlign);
    }
    carry_bytes = std::max(carry_bytes, bytes_of(inputs[stage]));
    if (stage == last) break;
    if (!seen.contains(kinds[stage]))
      seen[kinds[stage]] = probe_stage(stage, false, most, [&](const Weights& weights, const Gradients&) {
        return model->forward(stage, weights, inputs[stage], shared, options.train);
      });
    inputs.push_back(seen[kinds[stage]]);
  }
  seen.clear();
  Carry d_carry = probe_stage(last, options.train, most, [&](const Weights& weights, const Gradients& gradients) {
    if (options.train) return model->head_loss_and_backward(weights, gradients, inputs[last], shared, 1.0).d_carry;
    model->head_loss(weights, inputs[last], shared);
    return Carry();
  });
  for (int stage = last - 1; stage >= 0 && options.train; --stage) {
    carry_bytes = std::max(carry_bytes, bytes_of(d_carry));
    if (!seen.contains(kinds[stage]))
      seen[kinds[stage]] = probe_stage(stage, true, most, [&](const Weights& weights, const Gradients& gradients) {
        return model->backward(stage, weights, gradients, inputs[stage], shared, d_carry);
      });
    d_carry = seen[kinds[stage]];
  }
  // Live beside the stage at hand: every micro-batch's carry and its gradient, and what layers share. An eighth more
  // for blocks that are reused although a little too large.
  return most + most / 8 + options.micro_batches * (2 * carry_bytes + bytes_of(shared.tables) + 2 * ids.nbytes()) +
         (std::uint64_t{4} << 20);
}

std::uint64_t Session::Impl::probe_workspace() {
  torch_memory.release_kept();
  torch_memory.set_cap(options.device_memory);
  const torch::NoGradGuard no_grad;
  std::uint64_t bytes = 0;
  try {
    bytes = measure_workspace();
  } catch (const c10::OutOfMemoryError&) {
    // Too small a budget: measure anyway, so that the refusal can name the smallest one that works.
    torch_memory.set_cap(~std::uint64_t{0} / 2);
    bytes = measure_workspace();
  }
  torch_memory.release_kept();
  return bytes;
}

void Session::Impl::load(const WeightSource& weights, const Progress& progress) {
  std::uint64_t done = 0, total = 0;
  for (const swap::Chunk& chunk : layout->chunks()) total += chunk.elements;
  for (int id = 0; id < static_cast<int>(layout->chunks().size()); ++id) {
    load_chunk(*executor, *layout, packed, model->spec().units, id, options.train, threads, weights);
    done += layout->chunks()[id].elements;
    if (progress) progress("loading weights", done, total);
  }
}

}  // namespace tierflow

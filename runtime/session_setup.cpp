// How a session comes to be: measure what a stage needs, arrange the budgets, make the store, fill it.
#include <map>

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

}  // namespace

Session::Impl::Impl(std::unique_ptr<LayeredModel> model_, SessionOptions options_, AdamW adamw_)
    : model(std::move(model_)),
      options(std::move(options_)),
      adamw(adamw_),
      torch_device(options.device == "cuda" ? torch::kCUDA : torch::kCPU),
      packed(pack(model->spec(), options.precision)),
      threads(options.update_threads > 0 ? options.update_threads : at::get_num_threads()) {}

void Session::Impl::set_up(const WeightSource& weights, const Progress& progress) {
  if (options.micro_batch < 1 || options.micro_batches < 1 || options.sequence_length < 1)
    throw Exception(io::ErrorKind::usage, "--micro-batch, --micro-batches and --sequence-length are at least 1");
  workspace = probe_workspace();

  std::vector<swap::UnitShape> shapes;
  for (const PackedUnit& unit : packed.units) shapes.push_back(unit.shape);
  std::vector<swap::StageShape> stages = packed.stages;
  const std::uint64_t carry_bytes = carry_shape.empty() ? 0 : swap::round_up(carry_shape.back().offset + carry_shape.back().bytes, swap::kSector);
  for (std::size_t stage = 1; stage < stages.size(); ++stage) stages[stage].carry_bytes = carry_bytes;
  const std::uint64_t chunk_elements = options.chunk_elements != 0 ? options.chunk_elements : chunk_elements_for(options.host_memory);
  layout = std::make_unique<swap::Layout>(std::move(shapes), std::move(stages), chunk_elements);
  arrangement = value_or_throw(swap::arrange(*layout, {.host_budget = options.host_memory, .device_budget = options.device_memory, .workspace = workspace,
                                                       .micro_batches = options.micro_batches, .staged = options.clip.has_value(),
                                                       .storage = !options.storage.empty(), .train = options.train}));
  device = options.device == "cuda" ? value_or_throw(swap::open_cuda_device(0)) : swap::open_cpu_device({.chaos_seed = options.chaos_seed});

  const auto any = [](const std::vector<bool>& flags) { return std::find(flags.begin(), flags.end(), true) != flags.end(); };
  std::vector<bool> stored(layout->chunks().size());
  for (std::size_t id = 0; id < stored.size(); ++id)
    stored[id] = !arrangement.hi_resident[id] || (options.train && layout->chunks()[id].trainable && !arrangement.state_resident[id]);
  if (any(stored)) {
    swap::StoreOptions store_options{.volume = {.directories = options.storage, .engine = options.engine, .allow_buffered = options.allow_buffered,
                                                .allow_any_filesystem = options.allow_any_filesystem},
                                     .generations = options.generations, .staged_gradients = arrangement.staged};
    store = value_or_throw(swap::Store::create(std::move(store_options), *layout));
  }
  executor = value_or_throw(swap::Executor::create(*device, store.get(), *layout, arrangement, {.chaos_seed = options.chaos_seed}));
  planner = std::make_unique<swap::Planner>(*layout, arrangement);
  DeviceMemory& memory = DeviceMemory::install();
  memory.release_kept();
  memory.set_cap(options.device == "cuda" ? ~std::uint64_t{0} / 2 : options.device_memory - arrangement.device_bytes());
  memory.reset_peak();
  try {
    load(weights, progress);
  } catch (...) {
    executor.reset();
    if (store != nullptr) store->volume().remove_files();
    throw;
  }
}

// Runs each kind of stage once for one micro-batch on memory of its own and sees what it takes beside weights and gradients.
std::uint64_t Session::Impl::probe_workspace() {
  DeviceMemory& memory = DeviceMemory::install();
  memory.release_kept();
  memory.set_cap(options.device_memory);
  const torch::NoGradGuard no_grad;
  const auto on_device = torch::TensorOptions().device(torch_device);
  const auto ids = torch::zeros({options.micro_batch, options.sequence_length}, on_device.dtype(torch::kInt64));
  const MicroBatch batch{.ids = ids, .labels = ids};
  std::uint64_t most = 0;
  std::map<std::vector<std::vector<std::int64_t>>, bool> seen;  // blocks by their tensors' shapes
  Shared shared;
  Carry carry;
  std::uint64_t shared_bytes = 0;
  const int stages = static_cast<int>(model->spec().stages.size());
  const auto probe = [&](int stage) {
    Weights weights;
    Gradients gradients;
    const auto stage_units = model->spec().stages[stage].units;
    std::vector<std::vector<std::int64_t>> key;
    for (int unit : stage_units)
      for (const TensorSpec& tensor : model->spec().units[unit].tensors) key.push_back(tensor.shape);
    if (stage > 0 && stage + 1 < stages && !seen.emplace(key, true).second) return;
    for (int unit : stage_units)
      for (const TensorSpec& tensor : model->spec().units[unit].tensors) {
        weights.push_back(torch::zeros(tensor.shape, on_device.dtype(torch::kBFloat16)));
        const bool trained = options.train && model->spec().units[unit].trainable;
        gradients.push_back(trained ? torch::zeros(tensor.shape, on_device.dtype(torch::kFloat32)) : torch::Tensor());
      }
    const std::uint64_t fixed = memory.stats().used;
    memory.reset_peak();
    if (stage + 1 == stages) {
      if (options.train)
        model->head_loss_and_backward(weights, gradients, carry, shared, 1.0);
      else
        model->head_loss(weights, carry, shared);
    } else {
      const Carry out = model->forward(stage, weights, carry, shared, options.train);
      if (options.train) {
        Carry d_out;
        for (const torch::Tensor& part : out) d_out.push_back(torch::zeros_like(part));
        model->backward(stage, weights, gradients, carry, shared, d_out);
      }
      if (stage == 0) carry = out;
    }
    most = std::max(most, memory.stats().peak_used - fixed);
  };
  const auto all = [&] {
    seen.clear();
    most = 0;
    carry.clear();
    shared = model->share(batch, torch_device);
    shared_bytes = bytes_of(shared.tables) + 2 * ids.nbytes();
    for (int stage = 0; stage < stages; ++stage) probe(stage);
  };
  try {
    all();
  } catch (const c10::OutOfMemoryError&) {
    // Too small a budget: measure anyway, so that the refusal can name the smallest one that works.
    memory.set_cap(~std::uint64_t{0} / 2);
    all();
  }
  carry_shape.clear();
  std::uint64_t offset = 0;
  for (const torch::Tensor& part : carry) {
    carry_shape.push_back({.shape = part.sizes().vec(), .dtype = part.scalar_type(), .bytes = part.nbytes(), .offset = offset});
    offset += swap::round_up(part.nbytes(), kCarryAlign);
  }
  // Live beside the stage at hand: every micro-batch's carry and its gradient, and what layers share. An eighth more for blocks that
  // are reused although a little too large.
  const std::uint64_t live = options.micro_batches * (2 * bytes_of(carry) + shared_bytes);
  carry.clear();
  shared = {};
  memory.release_kept();
  return most + most / 8 + live + (std::uint64_t{4} << 20);
}

void Session::Impl::load(const WeightSource& weights, const Progress& progress) {
  std::uint64_t done = 0, total = 0;
  for (const swap::Chunk& chunk : layout->chunks()) total += chunk.elements;
  for (int id = 0; id < static_cast<int>(layout->chunks().size()); ++id) {
    load_chunk(id, weights);
    done += layout->chunks()[id].elements;
    if (progress) progress("loading weights", done, total);
  }
}

void Session::Impl::load_chunk(int id, const WeightSource& weights) {
  const swap::Chunk& chunk = layout->chunks()[id];
  const PackedUnit& unit = packed.units[chunk.unit];
  const UnitSpec& spec = model->spec().units[chunk.unit];
  struct Piece {
    const TensorSpec* tensor;
    std::uint64_t in_tensor, in_chunk, elements;
  };
  std::vector<Piece> pieces;
  for_each_piece(unit, chunk, [&](const PackedTensor& tensor, std::uint64_t in_tensor, std::uint64_t in_chunk, std::uint64_t count) {
    for (std::uint64_t at = 0; at < count; at += swap::kChunkQuantum)
      pieces.push_back({&spec.tensors[tensor.tensor], in_tensor + at, in_chunk + at, std::min<std::uint64_t>(swap::kChunkQuantum, count - at)});
  });
  const auto fill = [&](std::uint16_t* hi, std::uint16_t* lo) {
    threads.each(pieces.size(), [&](std::size_t index) {
      const Piece& piece = pieces[index];
      std::vector<float> values(piece.elements);
      weights(*piece.tensor, piece.in_tensor, values);
      if (lo != nullptr) return optim::split_master(values.data(), hi + piece.in_chunk, lo + piece.in_chunk, piece.elements);
      for (std::uint64_t i = 0; i < piece.elements; ++i) hi[piece.in_chunk + i] = optim::bf16_from_float(values[i]);
    });
  };
  io::Error inner;
  const io::Error outer = executor->access(swap::ExtentKind::hi, id, true, [&](std::span<std::byte> words) {
    std::fill(words.begin(), words.end(), std::byte{0});
    auto* hi = reinterpret_cast<std::uint16_t*>(words.data());
    if (!options.train || !chunk.trainable) return fill(hi, nullptr);
    inner = executor->access(swap::ExtentKind::state, id, true, [&](std::span<std::byte> state) {
      std::fill(state.begin(), state.end(), std::byte{0});
      const optim::State view = state_view(unit.formats[chunk.group], chunk.elements, hi, state.data());
      optim::zero_moment(view.m, chunk.elements, true);
      optim::zero_moment(view.v, chunk.elements, false);
      fill(hi, view.lo);
    });
  });
  throw_if(inner);
  throw_if(outer);
}

}  // namespace tierflow

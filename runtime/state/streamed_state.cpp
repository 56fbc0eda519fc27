#include "runtime/state/streamed_state.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "runtime/base/exception.h"

namespace tierflow {

std::unique_ptr<swap::Device> open_device(const std::string& name, std::uint64_t chaos_seed) {
  return name == "cuda" ? value_or_throw(swap::open_cuda_device(0)) : swap::open_cpu_device({.chaos_seed = chaos_seed});
}

StreamedState::StreamedState(const std::vector<UnitSpec>& units, const PackedModel& packed, const swap::Layout& layout,
                             const swap::Arrangement& arrangement, swap::Store* store, const Options& options)
    : units_(units),
      packed_(packed),
      layout_(layout),
      arrangement_(arrangement),
      train_(options.train),
      torch_device_(options.device == "cuda" ? torch::kCUDA : torch::kCPU),
      device_(open_device(options.device, options.chaos_seed)),
      threads_(options.update_threads > 0 ? options.update_threads : at::get_num_threads()),
      executor_(value_or_throw(swap::Executor::create(*device_, store, layout, arrangement,
                                                      {.chaos_seed = options.chaos_seed, .record = options.record}))) {}

std::vector<torch::Tensor> StreamedState::views(
    const swap::Entered& entered, const std::vector<int>& units, const std::uint64_t* offsets,
    const std::function<torch::Tensor(const TensorSpec&, const PackedTensor&, std::byte* unit)>& view) const {
  std::vector<torch::Tensor> views;
  for (std::size_t position = 0; position < units.size(); ++position) {
    const UnitSpec& unit = units_[units[position]];
    const std::size_t first = views.size();
    views.resize(first + unit.tensors.size());
    if (offsets[position] == swap::kNowhere) continue;
    for (const PackedTensor& tensor : packed_.units[units[position]].tensors)
      views[first + static_cast<std::size_t>(tensor.tensor)] =
          view(unit.tensors[tensor.tensor], tensor, entered.arena + offsets[position]);
  }
  return views;
}

// An embedding's backward has no weights.
std::vector<torch::Tensor> StreamedState::weights(const swap::Entered& entered) const {
  return weights(entered, layout_.stages()[entered.visit->stage].units, entered.visit->weights.data());
}

std::vector<torch::Tensor> StreamedState::needed_weights(const swap::Entered& entered) const {
  return weights(entered, entered.visit->needed,
                 entered.visit->weights.data() + layout_.stages()[entered.visit->stage].units.size());
}

std::vector<torch::Tensor> StreamedState::weights(const swap::Entered& entered, const std::vector<int>& units,
                                                  const std::uint64_t* offsets) const {
  const auto words = torch::TensorOptions().dtype(torch::kBFloat16).device(torch_device_);
  return views(entered, units, offsets, [&](const TensorSpec& spec, const PackedTensor& tensor, std::byte* unit) {
    std::byte* place = unit + swap::word_bytes(tensor.offset);
    if (spec.format == WeightFormat::bf16) return torch::from_blob(place, spec.shape, words);
    return torch::from_blob(place, {static_cast<std::int64_t>(swap::word_bytes(tensor.elements))},
                            words.dtype(torch::kUInt8));
  });
}

std::vector<torch::Tensor> StreamedState::gradients(const swap::Entered& entered) const {
  const auto floats = torch::TensorOptions().dtype(torch::kFloat32).device(torch_device_);
  return views(entered, layout_.stages()[entered.visit->stage].units, entered.visit->gradients.data(),
               [&](const TensorSpec& spec, const PackedTensor& tensor, std::byte* unit) {
                 if (!spec.trainable) return torch::Tensor();
                 return torch::from_blob(unit + sizeof(float) * tensor.offset, spec.shape, floats);
               });
}

void StreamedState::load(const WeightSource& weights, const StoredSource& stored, const Progress& progress) {
  std::uint64_t done = 0, total = 0;
  for (const swap::Chunk& chunk : layout_.chunks()) total += chunk.elements;
  for (int id = 0; id < static_cast<int>(layout_.chunks().size()); ++id) {
    load_chunk(id, weights, stored);
    done += layout_.chunks()[id].elements;
    if (progress) progress("loading weights", done, total);
  }
}

// The words of a frozen tensor in its format; they come in order, one tensor after the other.
std::span<const std::uint16_t> StreamedState::stored_words(const TensorSpec& tensor, const WeightSource& weights,
                                                           const StoredSource& stored) {
  if (stored_.empty()) {
    constexpr std::uint64_t kPart = swap::kChunkQuantum;
    stored_ = stored_weight(tensor, stored, [&](std::uint64_t first, std::span<float> out) {
      threads_.each((out.size() + kPart - 1) / kPart, [&](std::size_t part) {
        const std::uint64_t begin = part * kPart;
        weights(tensor, first + begin, out.subspan(begin, std::min<std::uint64_t>(kPart, out.size() - begin)));
      });
    });
  }
  return {reinterpret_cast<const std::uint16_t*>(stored_.data()), stored_.size() / 2};
}

void StreamedState::restore(swap::Store& store, const Progress& progress) {
  throw_if(store.restore(
      [&](swap::ExtentKind kind, int chunk, std::span<const std::byte> bytes) {
        if (arrangement_.stays(kind, chunk))
          throw_if(executor_->access(kind, chunk, true, [&](std::span<std::byte> place) {
            std::copy_n(bytes.begin(), place.size(), place.begin());
          }));
      },
      [&](std::uint64_t done, std::uint64_t total) {
        if (progress) progress("verifying the state", done, total);
      }));
  executor_->matches_store();
}

void StreamedState::load_chunk(int id, const WeightSource& weights, const StoredSource& stored) {
  const swap::Chunk& chunk = layout_.chunks()[id];
  const auto spec_of = [&](const TensorPiece& piece) -> const TensorSpec& {
    return units_[chunk.unit].tensors[piece.tensor->tensor];
  };
  std::vector<TensorPiece> pieces = pieces_of(packed_, chunk, swap::kChunkQuantum);
  std::erase_if(pieces, [&](const TensorPiece& piece) { return spec_of(piece).format != WeightFormat::bf16; });
  const auto fill = [&](std::uint16_t* hi, std::uint16_t* lo) {
    for (const TensorPiece& piece : pieces_of(packed_, chunk)) {
      if (spec_of(piece).format == WeightFormat::bf16) continue;
      const auto words = stored_words(spec_of(piece), weights, stored).subspan(piece.in_tensor, piece.elements);
      std::ranges::copy(words, hi + piece.in_chunk);
      if (piece.in_tensor + piece.elements == piece.tensor->elements) stored_ = {};  // those were its last words
    }
    threads_.each(pieces.size(), [&](std::size_t index) {
      const TensorPiece& piece = pieces[index];
      std::vector<float> values(piece.elements);
      weights(spec_of(piece), piece.in_tensor, values);
      if (lo != nullptr)
        return optim::split_master(values.data(), hi + piece.in_chunk, lo + piece.in_chunk, piece.elements);
      for (std::uint64_t i = 0; i < piece.elements; ++i) hi[piece.in_chunk + i] = optim::bf16_from_float(values[i]);
    });
  };
  io::Error inner;
  const io::Error outer = executor_->access(swap::ExtentKind::hi, id, true, [&](std::span<std::byte> words) {
    std::fill(words.begin(), words.end(), std::byte{0});
    auto* hi = reinterpret_cast<std::uint16_t*>(words.data());
    if (!train_ || chunk.state_bytes == 0) return fill(hi, nullptr);
    inner = executor_->access(swap::ExtentKind::state, id, true, [&](std::span<std::byte> state) {
      std::fill(state.begin(), state.end(), std::byte{0});
      if (!chunk.trainable) return fill(hi, reinterpret_cast<std::uint16_t*>(state.data()));
      const optim::State view =
          state_view(packed_.units[chunk.unit].formats[chunk.group], chunk.elements, hi, state.data());
      optim::zero_moment(view.m, chunk.elements, true);
      optim::zero_moment(view.v, chunk.elements, false);
      fill(hi, view.lo);
    });
  });
  throw_if(inner);
  throw_if(outer);
}

ModelExtents StreamedState::extents() {
  return {.units = units_,
          .packed = packed_,
          .layout = layout_,
          .has_state = train_,
          .read = [this](swap::ExtentKind kind, int chunk, const auto& use) {
            throw_if(executor_->access(kind, chunk, false, use));
          }};
}

void StreamedState::read_words(int unit, int tensor, swap::ExtentKind kind, std::uint16_t* out) {
  tierflow::read_words(extents(), unit, tensor, kind, out);
}

void StreamedState::read_master(int unit, int tensor, const UseMaster& use) {
  tierflow::read_master(extents(), unit, tensor, use);
}

void StreamedState::write(int unit, int tensor, const float* values) {
  rewrite(
      unit, [tensor](int other) { return other == tensor; },
      [values](int, std::uint64_t first, std::span<float> out) {
        std::copy_n(values + first, out.size(), out.begin());
      });
}

void StreamedState::rewrite(int unit, const Wanted& wanted, const Change& change) {
  const ModelExtents model = extents();
  for (const swap::Chunk& chunk : layout_.chunks_of(unit)) {
    std::vector<TensorPiece> pieces = pieces_of(packed_, chunk);
    std::erase_if(pieces, [&](const TensorPiece& piece) { return !wanted(piece.tensor->tensor); });
    if (pieces.empty()) continue;
    // An extent is written whole: what the tensors do not cover comes from a copy.
    const bool split = model.has_low_words(chunk);
    std::vector<std::byte> words, state;
    const auto copied = [&](swap::ExtentKind kind, std::vector<std::byte>& copy) {
      throw_if(executor_->access(kind, chunk.id, false,
                                 [&](std::span<std::byte> bytes) { copy.assign(bytes.begin(), bytes.end()); }));
      return reinterpret_cast<std::uint16_t*>(copy.data());
    };
    std::uint16_t* const hi = copied(swap::ExtentKind::hi, words);
    std::uint16_t* const lo = split ? copied(swap::ExtentKind::state, state) : nullptr;
    std::vector<float> values;
    for (const TensorPiece& piece : pieces) {
      values.resize(piece.elements);
      std::uint16_t* const high = hi + piece.in_chunk;
      widen_words(high, split ? lo + piece.in_chunk : nullptr, values);
      change(piece.tensor->tensor, piece.in_tensor, values);
      if (split)
        optim::split_master(values.data(), high, lo + piece.in_chunk, values.size());
      else
        std::ranges::transform(values, high, optim::bf16_from_float);
    }
    const auto put = [&](swap::ExtentKind kind, const std::vector<std::byte>& copy) {
      throw_if(executor_->access(kind, chunk.id, true, [&](std::span<std::byte> bytes) {
        std::copy_n(copy.begin(), bytes.size(), bytes.begin());
      }));
    };
    put(swap::ExtentKind::hi, words);
    if (split) put(swap::ExtentKind::state, state);
  }
}

void StreamedState::read_chunk(int chunk, const std::function<void(std::span<std::byte> words)>& use) {
  throw_if(executor_->access(swap::ExtentKind::hi, chunk, false, use));
}

namespace {

// A chunk of an export, and which of its tensors are written from it.
struct ExportedChunk {
  int unit = 0;
  const swap::Chunk* chunk = nullptr;
  std::string_view name;  // of the one tensor; empty: all
};

std::vector<ExportedChunk> order_of_export(const std::vector<UnitSpec>& units, const PackedModel& packed,
                                           const swap::Layout& layout) {
  std::vector<ExportedChunk> order;
  const auto name_of = [&](int unit, const PackedTensor& tensor) -> const std::string& {
    return units[unit].tensors[tensor.tensor].name;
  };
  const auto add = [&](int unit, std::string_view name) {
    for (const swap::Chunk& chunk : layout.chunks_of(unit)) {
      const auto is_wanted = [&](const TensorPiece& piece) {
        return name.empty() || name_of(unit, *piece.tensor) == name;
      };
      if (std::ranges::any_of(pieces_of(packed, chunk), is_wanted))
        order.push_back({.unit = unit, .chunk = &chunk, .name = name});
    }
  };
  const int count = static_cast<int>(packed.units.size());
  for (int unit = 0; unit < count; ++unit) {
    const std::vector<PackedTensor>& tensors = packed.units[unit].tensors;
    const auto spec_of = [&](const PackedTensor& tensor) -> const TensorSpec& {
      return units[unit].tensors[tensor.tensor];
    };
    if (std::ranges::none_of(tensors, [&](const auto& tensor) { return spec_of(tensor).all_rows != 0; })) {
      add(unit, {});
      continue;
    }
    // A tensor whose other tiles lie in the units that follow is written to its end; these skip what is written.
    for (const PackedTensor& first : tensors) {
      const std::string& name = spec_of(first).name;
      if (spec_of(first).first_row != 0) continue;
      bool found = true;
      for (int holds = unit; found && holds < count; ++holds) {
        found = std::ranges::any_of(packed.units[holds].tensors,
                                    [&](const PackedTensor& tensor) { return name_of(holds, tensor) == name; });
        if (found) add(holds, name);
      }
    }
  }
  return order;
}

}  // namespace

void write_weights(CheckpointWriter& writer, const std::vector<UnitSpec>& units, const PackedModel& packed,
                   const swap::Layout& layout, const std::function<bool(int unit, int tensor)>& wanted,
                   const ReadChunk& read, const char* phase, const Progress& progress) {
  std::uint64_t done = 0, total = 0;
  for (const PackedUnit& unit : packed.units)
    for (const PackedTensor& tensor : unit.tensors) total += tensor.elements;
  const std::vector<ExportedChunk> order = order_of_export(units, packed, layout);
  std::vector<int> ids;
  for (const ExportedChunk& each : order) ids.push_back(layout.first_chunk(each.unit) + each.chunk->index);
  for (std::size_t i = 0; i < order.size(); ++i) {
    const ExportedChunk& each = order[i];
    read(std::span(ids).subspan(i), [&](std::span<std::byte> words) {
      for (const TensorPiece& piece : pieces_of(packed, *each.chunk)) {
        const int tensor = piece.tensor->tensor;
        if (!each.name.empty() && units[each.unit].tensors[tensor].name != each.name) continue;
        if (wanted(each.unit, tensor))
          writer.write(words.subspan(swap::word_bytes(piece.in_chunk), swap::word_bytes(piece.elements)));
        done += piece.elements;
      }
    });
    if (progress) progress(phase, done, total);
  }
}

}  // namespace tierflow

#include "runtime/session/window_sum.h"

#include <torch/utils.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "optim/adamw.h"
#include "runtime/spec/adapters.h"

namespace tierflow {
namespace {

constexpr std::int64_t kRowElements = 1 << 18;  // of a product at once

struct Pair {
  int weight = -1;
  torch::Tensor a, b;
};

}  // namespace

WindowSum::WindowSum(const ModelSpec& spec, int unit,
                     const std::function<void(int tensor, const UseMaster& use)>& master) {
  const torch::NoGradGuard no_grad;
  const std::vector<TensorSpec>& tensors = spec.units[static_cast<std::size_t>(unit)].tensors;
  std::map<std::string, Pair> modules;
  for (int index = 0; index < static_cast<int>(tensors.size()); ++index) {
    const TensorSpec& tensor = tensors[static_cast<std::size_t>(index)];
    if (tensor.rewritten == Rewritten::master) modules[linear_module(tensor)].weight = index;
    if (!is_adapter(tensor)) continue;
    torch::Tensor values = torch::empty(tensor.shape, torch::kFloat32);
    auto* next = values.data_ptr<float>();
    master(index, [&](std::span<const float> part) { next = std::copy(part.begin(), part.end(), next); });
    (adapter_part(tensor) == AdapterPart::a ? modules[linear_module(tensor)].a : modules[linear_module(tensor)].b) =
        values;
  }
  for (const auto& [name, found] : modules)
    if (has_transposed_weights(spec))
      products_[found.weight] = {.left = found.a.t().contiguous(), .right = found.b.t().contiguous()};
    else
      products_[found.weight] = {.left = found.b, .right = found.a};
}

// Of whole runs of rows that begin at multiples of a number that the shape decides: the bits of a product may depend on
// how many rows it has.
void WindowSum::add_to(int tensor, std::uint64_t first, std::span<float> values) const {
  const auto found = products_.find(tensor);
  if (found == products_.end()) return;
  const torch::NoGradGuard no_grad;
  const auto& [left, right] = found->second;
  const std::int64_t rows = left.size(0), columns = right.size(1);
  const std::int64_t each = std::max<std::int64_t>(1, kRowElements / columns);
  const auto begin = static_cast<std::int64_t>(first), end = begin + static_cast<std::int64_t>(values.size());
  for (std::int64_t row = begin / columns / each * each; row * columns < end; row += each) {
    const torch::Tensor product = torch::mm(left.narrow(0, row, std::min(each, rows - row)), right);
    const std::int64_t from = std::max(begin, row * columns), to = std::min(end, row * columns + product.numel());
    const float* const added = product.const_data_ptr<float>() + (from - row * columns);
    float* const out = values.data() + (from - begin);
    std::transform(added, added + (to - from), out, out, std::plus<>());
  }
}

ReadChunk read_with_windows(const ModelSpec& spec, const ModelExtents& extents) {
  struct Held {
    int unit = -1;
    std::unique_ptr<WindowSum> sum;  // its
  };
  return [&spec, extents, held = std::make_shared<Held>()](std::span<const int> chunks,
                                                           const std::function<void(std::span<std::byte> words)>& use) {
    const int id = chunks.front();
    const swap::Chunk& chunk = extents.layout.chunks()[static_cast<std::size_t>(id)];
    if (!chunk.rewritten) return extents.read(swap::ExtentKind::hi, id, use);
    if (held->unit != chunk.unit)
      held->sum = std::make_unique<WindowSum>(
          spec, chunk.unit, [&](int tensor, const UseMaster& part) { read_master(extents, chunk.unit, tensor, part); });
    held->unit = chunk.unit;
    std::vector<std::byte> words, state;
    extents.read(swap::ExtentKind::hi, id,
                 [&](std::span<std::byte> bytes) { words.assign(bytes.begin(), bytes.end()); });
    const bool split = extents.has_low_words(chunk);
    if (split)
      extents.read(swap::ExtentKind::state, id,
                   [&](std::span<std::byte> bytes) { state.assign(bytes.begin(), bytes.end()); });
    auto* const hi = reinterpret_cast<std::uint16_t*>(words.data());
    const auto* const lo = reinterpret_cast<const std::uint16_t*>(state.data());
    std::vector<float> values;
    for (const TensorPiece& piece : pieces_of(extents.packed, chunk)) {
      values.resize(piece.elements);
      widen_words(hi + piece.in_chunk, split ? lo + piece.in_chunk : nullptr, values);
      held->sum->add_to(piece.tensor->tensor, piece.in_tensor, values);
      std::ranges::transform(values, hi + piece.in_chunk, optim::bf16_from_float);
    }
    use(words);
  };
}

}  // namespace tierflow

#include "runtime/planning/loading.h"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "runtime/spec/adapters.h"

namespace tierflow {
namespace {

std::uint64_t stored(const TensorSpec& tensor) {
  return quantising_bytes(tensor.format, tensor.shape);
}

// The factors of W [out, in], with W. LAPACK's whole decomposition takes a copy of W, its factors, and workspace for
// the smaller side; a thin one the bases of both sides, several at once.
std::uint64_t decomposed(std::uint64_t out, std::uint64_t in, std::uint64_t wide) {
  const std::uint64_t small = std::min(out, in);
  if (wide != 0) return 4 * (out * in + 6 * wide * (out + in) + 8 * wide * wide);
  return 4 * (2 * out * in + 2 * small * (out + in) + 8 * small * small);
}

}  // namespace

std::uint64_t loading_bytes(const ModelSpec& spec) {
  const bool adapted = !spec.adapter_config_json.empty();
  const AdapterConfig config =
      adapted ? parse_adapter_config(spec.adapter_config_json, "the model's adapters") : AdapterConfig();
  std::uint64_t most = 0, first_values = 0, all_values = 0;
  for (const UnitSpec& unit : spec.units) {
    for (const TensorSpec& tensor : unit.tensors) most = std::max(most, stored(tensor));
    if (!adapted) continue;
    std::map<std::string, std::uint64_t> held;  // by module: its weight's bytes in a format
    for (const TensorSpec& tensor : unit.tensors)
      if (!is_adapter(tensor)) held[linear_module(tensor)] = stored(tensor);
    std::uint64_t values = 0, in = 0;
    for (const TensorSpec& tensor : unit.tensors) {
      const AdapterPart part = adapter_part(tensor);
      const std::uint64_t weight = is_adapter(tensor) ? held[linear_module(tensor)] : 0;
      if (part == AdapterPart::initial_magnitude) {
        most = std::max(most, weight);
        values += 4 * static_cast<std::uint64_t>(tensor.elements());
      }
      if (part == AdapterPart::initial_a) in = static_cast<std::uint64_t>(tensor.shape[1]);
      if (part == AdapterPart::initial_b) {
        const auto out = static_cast<std::uint64_t>(tensor.shape[0]),
                   rank = static_cast<std::uint64_t>(tensor.shape[1]);
        most = std::max(most, decomposed(out, in, basis_columns(config, rank, out, in)) + weight);
        values += 2 * rank * (out + in);
      }
    }
    first_values = std::max(first_values, values);
    all_values += values;
  }
  // Those of a gradient are all there at once; a factor that is turned as it is read from a folder stays for a while.
  return most + (of_gradient(config.init) ? all_values : first_values) + turned_factor_bytes(spec, 2) +
         spec.source_bytes;
}

std::uint64_t turned_factor_bytes(const ModelSpec& spec, std::size_t most) {
  std::map<std::string, std::uint64_t> factors;
  for (const UnitSpec& unit : spec.units)
    for (const TensorSpec& tensor : unit.tensors) {
      if (!is_turned_beside_base(tensor)) continue;
      std::uint64_t bytes = 4;
      for (const std::int64_t size : tensor.checkpoint_shape()) bytes *= static_cast<std::uint64_t>(size);
      factors[name_beside_base(tensor)] = bytes;
    }
  std::vector<std::uint64_t> sizes;
  for (const auto& [name, bytes] : factors) sizes.push_back(bytes);
  std::ranges::sort(sizes, std::greater());
  return std::accumulate(sizes.begin(), sizes.begin() + static_cast<std::ptrdiff_t>(std::min(most, sizes.size())),
                         std::uint64_t{0});
}

std::uint64_t window_bytes(const ModelSpec& spec, const swap::Layout& layout) {
  constexpr std::uint64_t kProduct = std::uint64_t{1} << 18;  // elements, or a row
  std::uint64_t projectors = 0, factors = 0, product = 0;
  for (const UnitSpec& unit : spec.units) {
    std::uint64_t here = 0;
    for (const TensorSpec& tensor : unit.tensors) {
      const auto elements = static_cast<std::uint64_t>(tensor.elements());
      if (tensor.rewritten == Rewritten::master)
        product = std::max({product, std::min(elements, kProduct), static_cast<std::uint64_t>(tensor.shape.back())});
      if (!is_adapter(tensor)) continue;
      here += 4 * elements;
      if (!tensor.trainable) projectors += 2 * elements;
    }
    factors = std::max(factors, here);
  }
  // Words and their values: a chunk has a value for each word.
  return projectors + 2 * factors + 4 * product + 3 * layout.max_word_bytes() + layout.max_state_bytes();
}

std::uint64_t gradient_bytes(const ModelSpec& spec) {
  const bool windows = window_steps(spec) != 0;
  if (!begins_with_gradient(spec) && !windows) return 0;
  std::uint64_t most = 0;
  for (const StageSpec& stage : spec.stages) {
    std::uint64_t bytes = 0, in = 0, decomposing = 0;
    for (const int unit : stage.units)
      for (const TensorSpec& tensor : spec.units[static_cast<std::size_t>(unit)].tensors) {
        const AdapterPart part = adapter_part(tensor);
        if (part == (windows ? AdapterPart::a : AdapterPart::initial_a))
          in = static_cast<std::uint64_t>(tensor.shape[1]);
        if (part != (windows ? AdapterPart::b : AdapterPart::initial_b)) continue;
        const auto out = static_cast<std::uint64_t>(tensor.shape[0]),
                   rank = static_cast<std::uint64_t>(tensor.shape[1]);
        bytes += 6 * in * out;
        if (windows)
          decomposing =
              std::max(decomposing,
                       decomposed(out, in, basis_columns({.init = AdapterInit::galore}, rank, out, in)) - 4 * out * in);
      }
    most = std::max(most, bytes + decomposing);
  }
  return most;
}

}  // namespace tierflow

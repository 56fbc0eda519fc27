// Models with low-rank adapters: put there new or from PEFT's folder, written as that, and added to their base.
#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "runtime/base/exception.h"
#include "runtime/checkpoint/init.h"
#include "runtime/checkpoint/source_folder.h"
#include "runtime/session/adapter_init.h"
#include "runtime/session/session_impl.h"

namespace tierflow {
namespace {

namespace fs = std::filesystem;

constexpr const char* kWeights = "adapter_model.safetensors";
constexpr std::int64_t kPieceElements = 16 << 20;  // of a weight, while adapters are added to it

// How the values of an adapter's tensor come, as fp32 in its shape.
using AdapterValues = std::function<torch::Tensor(const TensorSpec& tensor)>;

Model adapted(const Model& base, const AdapterConfig& config, WeightSource adapters) {
  Model model = changed(base, "adapters", [&](ModelSpec& spec) { add_adapters(spec, config); });
  model.weights = [adapters = std::move(adapters), weights = base.weights](const TensorSpec& tensor,
                                                                           std::uint64_t first, std::span<float> out) {
    (is_adapter(tensor) || tensor.trainable ? adapters : weights)(tensor, first, out);
  };
  return model;
}

// A folder of PEFT's.
struct AdapterFolder {
  AdapterConfig config;
  std::shared_ptr<const Checkpoint> weights;
};

AdapterFolder open_adapter(const fs::path& folder) {
  return {.config = read_adapter_config(folder),
          .weights = std::make_shared<const Checkpoint>(Checkpoint::open_file(folder, kWeights))};
}

// As it is called there.
TensorSpec beside_base(TensorSpec tensor) {
  tensor.name = name_beside_base(tensor);
  return tensor;
}

// What the folder of `spec`'s adapters has.
void check_adapters(const ModelSpec& spec, const Checkpoint& weights) {
  ModelSpec adapters;
  adapters.units.emplace_back();
  std::vector<TensorSpec>& tensors = adapters.units.front().tensors;
  for (const UnitSpec& unit : spec.units)
    for (const TensorSpec& tensor : unit.tensors)
      if (!name_beside_base(tensor).empty()) tensors.push_back(beside_base(tensor));
  // A tied embedding's second name is there, or not.
  if (const std::string head = tied_name_beside_base(spec); !head.empty() && weights.find(head) != nullptr) {
    tensors.push_back(spec.units.front().tensors.front());
    tensors.back().name = head;
  }
  check_tensors(adapters, weights, "adapter_config.json");
}

torch::Tensor values_of(const Checkpoint& weights, const TensorSpec& tensor) {
  torch::Tensor values = torch::empty(tensor.shape, torch::kFloat32);
  weights.read_f32(beside_base(tensor), 0, {values.data_ptr<float>(), static_cast<std::size_t>(values.numel())});
  return values;
}

// A model in a folder, and its specification with the adapters that are to be added to it.
struct Merge {
  ModelSpec spec;
  std::shared_ptr<const Checkpoint> base;
  SourceFolder source;
};

Merge open_merge(const fs::path& base, const AdapterConfig& config, const std::string& as) {
  ModelSpec spec = read_model_spec(base / "config.json", Tiling::none(), as);
  const auto weights = std::make_shared<const Checkpoint>(Checkpoint::open(base));
  check_tensors(spec, *weights);
  Merge merge{.spec = spec, .base = weights, .source = SourceFolder(spec, weights)};
  add_adapters(merge.spec, config);
  return merge;
}

// What is added to a weight: left @ right * scale; undefined where it has no adapter. Then its rows (columns, where it
// is [in, out]) are brought to lengths, where these are defined.
struct Addend {
  torch::Tensor left, right, lengths;
  double scale = 1;
};

Addend addend_of(const UnitSpec& unit, const TensorSpec& weight, bool transposed, const AdapterValues& values) {
  torch::Tensor a, b, lengths;
  double scale = 1;
  for (const TensorSpec& factor : unit.tensors) {
    if (!is_adapter(factor) || linear_module(factor) != linear_module(weight)) continue;
    const AdapterPart part = adapter_part(factor);
    if (part == AdapterPart::a) a = values(factor);
    if (part == AdapterPart::b) b = values(factor);
    if (part == AdapterPart::b) scale = factor.scale;
    if (part == AdapterPart::initial_a) a = torch::cat({a, values(factor)}, 0);
    if (part == AdapterPart::initial_b) b = torch::cat({b, -values(factor)}, 1);
    if (part == AdapterPart::magnitude) lengths = values(factor);
    if (part == AdapterPart::initial_magnitude) lengths = lengths + values(factor);
  }
  if (!a.defined()) return {};
  if (transposed) return {.left = a.t().contiguous(), .right = b.t().contiguous(), .lengths = lengths, .scale = scale};
  return {.left = b, .right = a, .lengths = lengths, .scale = scale};
}

// Writes the model with the adapters added to its weights, in fp32, rounded to bf16 once, and with the modules that
// were trained whole.
void write_merged(const Merge& merge, const AdapterValues& values, const fs::path& folder, const Progress& progress) {
  const torch::NoGradGuard no_grad;
  const ModelSpec& spec = merge.spec;
  const bool transposed = has_transposed_weights(spec);
  std::vector<TensorHeader> headers;
  std::uint64_t done = 0, total = 0;
  for (const UnitSpec& unit : spec.units)
    for (const TensorSpec& tensor : unit.tensors) {
      if (is_adapter(tensor)) continue;
      headers.push_back({.name = merge.source.name_of(tensor), .dtype = dtype_of(tensor), .shape = tensor.shape});
      total += static_cast<std::uint64_t>(tensor.elements());
    }
  std::ranges::move(merge.source.headers(), std::back_inserter(headers));
  CheckpointWriter writer(folder, std::move(headers));
  for (const UnitSpec& unit : spec.units)
    for (const TensorSpec& tensor : unit.tensors) {
      if (is_adapter(tensor)) continue;
      const Addend addend = addend_of(unit, tensor, transposed, values);
      const torch::Tensor instead = tensor.trainable ? values(tensor) : torch::Tensor();
      const std::int64_t rows = tensor.shape.empty() ? 1 : tensor.shape.front();
      const std::int64_t columns = rows == 0 ? 0 : tensor.elements() / rows;
      const bool whole = transposed && addend.lengths.defined();  // lengths of columns
      const std::int64_t step =
          whole ? rows : std::clamp<std::int64_t>(kPieceElements / std::max<std::int64_t>(columns, 1), 1, rows);
      for (std::int64_t row = 0; row < rows; row += step) {
        const std::int64_t count = std::min(step, rows - row);
        torch::Tensor piece = torch::empty({count, columns}, torch::kFloat32);
        if (instead.defined())
          piece = instead.view({rows, columns}).narrow(0, row, count);
        else
          merge.base->read_f32(tensor, static_cast<std::uint64_t>(row * columns),
                               {piece.data_ptr<float>(), static_cast<std::size_t>(piece.numel())});
        if (addend.left.defined()) piece.addmm_(addend.left.narrow(0, row, count), addend.right, 1, addend.scale);
        if (addend.lengths.defined()) {
          const torch::Tensor now = torch::linalg_vector_norm(piece, 2, {transposed ? 0 : 1}).clamp_min_(1e-30);
          const torch::Tensor gain = (transposed ? addend.lengths : addend.lengths.narrow(0, row, count)) / now;
          piece.mul_(transposed ? gain : gain.unsqueeze(1));
        }
        const torch::Tensor words = dtype_of(tensor) == Dtype::f32 ? piece : piece.to(torch::kBFloat16);
        writer.write({static_cast<const std::byte*>(words.data_ptr()), static_cast<std::size_t>(words.nbytes())});
        done += static_cast<std::uint64_t>(piece.numel());
        if (progress) progress("adding adapters", done, total);
      }
    }
  merge.source.write(writer, {}, progress);
  writer.finish(merge.source.config_json());
}

// Rows of [b, -b0].
std::vector<float> beside(const std::vector<float>& b, const std::vector<float>& b0, std::size_t rows) {
  const std::size_t columns = b.size() / rows;
  std::vector<float> both;
  both.reserve(2 * b.size());
  for (std::size_t at = 0; at < b.size(); at += columns) {
    both.insert(both.end(), b.begin() + at, b.begin() + at + columns);
    std::transform(b0.begin() + at, b0.begin() + at + columns, std::back_inserter(both), std::negate<>());
  }
  return both;
}

// With the lengths of the base's rows where DoRA wants them: `model` has magnitudes as PEFT has them, and these become
// what is to be added to those lengths. fresh: they have none yet, and nothing is to be added.
Model with_lengths(Model model, const Model& base, bool fresh) {
  const auto lengths = std::make_shared<RowLengths>(model.spec(), base.weights);
  model.weights = [lengths, fresh, weights = std::move(model.weights)](const TensorSpec& tensor, std::uint64_t first,
                                                                       std::span<float> out) {
    const AdapterPart part = adapter_part(tensor);
    if (part == AdapterPart::initial_magnitude) return lengths->read(tensor, first, out);
    weights(tensor, first, out);
    if (part != AdapterPart::magnitude || fresh) return;
    std::vector<float> before(out.size());
    lengths->read(tensor, first, before);
    std::ranges::transform(out, before, out.begin(), std::minus<>());
  };
  return model;
}

}  // namespace

Model with_adapters(const Model& base, const AdapterConfig& config, std::uint64_t seed) {
  if (config.init != AdapterInit::standard) {
    Model model = adapted(base, config, {});
    model.weights = adapters_from_base(model.spec(), config, seed, base.weights);
    return model;
  }
  Model model =
      adapted(base, config,
              [seed, weights = base.weights](const TensorSpec& tensor, std::uint64_t first, std::span<float> out) {
                if (!is_adapter(tensor)) return weights(tensor, first, out);
                initial_values(tensor, seed, first, out);
              });
  return config.dora ? with_lengths(std::move(model), base, true) : model;
}

Model with_adapters(const Model& base, const fs::path& folder) {
  const AdapterFolder adapter = open_adapter(folder);
  Model model =
      adapted(base, adapter.config,
              [weights = adapter.weights](const TensorSpec& tensor, std::uint64_t first, std::span<float> out) {
                weights->read_f32(beside_base(tensor), first, out);
              });
  check_adapters(model.spec(), *adapter.weights);
  return adapter.config.dora ? with_lengths(std::move(model), base, false) : model;
}

void merge_adapter(const fs::path& base, const fs::path& adapter, const fs::path& folder, const Progress& progress,
                   const std::string& as) {
  const AdapterFolder found = open_adapter(adapter);
  const Merge merge = open_merge(base, found.config, as);
  check_adapters(merge.spec, *found.weights);
  write_merged(
      merge,
      [&](const TensorSpec& tensor) {
        // The magnitudes there are whole.
        return adapter_part(tensor) == AdapterPart::initial_magnitude ? torch::zeros(tensor.shape)
                                                                      : values_of(*found.weights, tensor);
      },
      folder, progress);
}

void write_adapter(const ModelSpec& spec, const fs::path& base, const fs::path& folder, const MasterOf& master) {
  struct Tensor {
    TensorHeader header;
    std::vector<std::pair<int, int>> parts;  // unit and tensor: rows one after the other, or
    bool columns = false;                    // B and B0, or
    bool sum = false;                        // what is added to lengths, and these
  };
  std::vector<Tensor> tensors;
  for (std::size_t unit = 0; unit < spec.units.size(); ++unit)
    for (std::size_t index = 0; index < spec.units[unit].tensors.size(); ++index) {
      const TensorSpec& tensor = spec.units[unit].tensors[index];
      const std::string name = name_beside_base(tensor);
      if (name.empty()) continue;
      auto found = std::ranges::find_if(tensors, [&](const Tensor& each) { return each.header.name == name; });
      if (found == tensors.end())
        found = tensors.insert(found, {{.name = name, .dtype = Dtype::f32, .shape = tensor.checkpoint_shape()}, {}});
      found->parts.emplace_back(static_cast<int>(unit), static_cast<int>(index));
      const AdapterPart part = adapter_part(tensor);
      if (part == AdapterPart::initial_a) found->header.shape[0] += tensor.shape[0];
      if (part == AdapterPart::initial_b) found->header.shape[1] += tensor.shape[1];
      found->columns = part == AdapterPart::initial_b;
      found->sum = part == AdapterPart::initial_magnitude;
    }
  if (const std::string head = tied_name_beside_base(spec); !head.empty()) {
    const std::string table = name_beside_base(spec.units.front().tensors.front());
    Tensor copy = *std::ranges::find_if(tensors, [&](const Tensor& each) { return each.header.name == table; });
    copy.header.name = head;
    tensors.push_back(std::move(copy));
  }
  std::vector<TensorHeader> headers;
  for (const Tensor& tensor : tensors) headers.push_back(tensor.header);
  CheckpointWriter writer(folder, headers, CheckpointWriter::Adapter{});
  for (const Tensor& tensor : tensors) {
    std::vector<float> before;  // the first of two
    for (const auto& [unit, index] : tensor.parts) {
      std::vector<float> values = master(unit, index);
      if ((tensor.columns || tensor.sum) && before.empty()) {
        before = std::move(values);
        continue;
      }
      if (tensor.columns) values = beside(before, values, static_cast<std::size_t>(tensor.header.shape[0]));
      if (tensor.sum) std::ranges::transform(values, before, values.begin(), std::plus<>());
      writer.write(std::as_bytes(std::span(values)));
    }
  }
  auto config = nlohmann::ordered_json::parse(adapter_config_beside_base(spec));
  if (!base.empty()) config["base_model_name_or_path"] = base.string();
  writer.finish(config.dump(2) + "\n");
}

void Session::export_adapter(const fs::path& folder, const fs::path& base) {
  const ModelSpec& spec = impl_->model->spec();
  if (spec.adapter_config_json.empty())
    throw Exception(io::ErrorKind::usage, "the model has no adapters: export_hf() writes it");
  write_adapter(spec, base, folder, [this](int unit, int tensor) { return master(unit, tensor); });
}

void Session::export_merged(const fs::path& base, const fs::path& folder, const Progress& progress) {
  const ModelSpec& spec = impl_->model->spec();
  if (spec.adapter_config_json.empty())
    throw Exception(io::ErrorKind::usage, "the model has no adapters: export_hf() writes it");
  write_merged(
      open_merge(base, parse_adapter_config(spec.adapter_config_json, "the model's adapters"), spec.read_as),
      [&](const TensorSpec& tensor) {
        const std::vector<float> values = master(tensor.name);
        return torch::tensor(values, torch::kFloat32).reshape(tensor.shape);
      },
      folder, progress);
}

}  // namespace tierflow

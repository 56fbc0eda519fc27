#include "runtime/session/adapter_folder.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <span>
#include <utility>
#include <vector>

#include "runtime/base/exception.h"
#include "runtime/checkpoint/init.h"
#include "runtime/checkpoint/source_folder.h"
#include "runtime/checkpoint/weights_hash.h"
#include "runtime/session/session.h"

namespace tierflow {
namespace {

namespace fs = std::filesystem;

constexpr const char* kWeights = "adapter_model.safetensors";
constexpr std::size_t kSavedAtOnce = 1 << 14;  // values

std::vector<float> whole(const MasterOf& master, const std::pair<int, int>& at) {
  std::vector<float> all;
  master(at.first, at.second,
         [&](std::span<const float> values) { all.insert(all.end(), values.begin(), values.end()); });
  return all;
}

std::vector<float> sum_of(std::vector<float> a, const std::vector<float>& b) {
  std::ranges::transform(a, b, a.begin(), std::plus<>());
  return a;
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

// Where a value of a tensor [first, ..] lies in [.., first]: of B of all experts [experts, out, rank] in [out, rank *
// experts], of A of a table [vocabulary, rank] in [rank, vocabulary].
class Turned {
 public:
  Turned(std::size_t first, std::size_t values) : first_(first), of_one_(values / first) {}
  std::size_t there(std::size_t here) const { return here % of_one_ * first_ + here / of_one_; }
  std::size_t here(std::size_t there) const { return there % first_ * of_one_ + there / first_; }

 private:
  std::size_t first_, of_one_;
};

std::size_t product(const std::vector<std::int64_t>& shape) {
  std::size_t values = 1;
  for (const std::int64_t size : shape) values *= static_cast<std::size_t>(size);
  return values;
}

}  // namespace

AdapterFolder open_adapter(const fs::path& folder) {
  return {.config = read_adapter_config(folder),
          .weights = std::make_shared<const Checkpoint>(Checkpoint::open_file(folder, kWeights))};
}

bool is_for_other_weights(const fs::path& adapter, const fs::path& base, const std::string& as) {
  const std::string then = open_adapter(adapter).weights->base_weights();
  return !then.empty() && then != hash_text(weights_hash(base, as));
}

void AdapterReader::read(const TensorSpec& tensor, std::uint64_t first, std::span<float> out) {
  const std::string name = name_beside_base(tensor);
  first += static_cast<std::uint64_t>(tensor.first_element());
  if (!is_turned_beside_base(tensor)) return weights_->read_f32(name, first, out);
  const std::lock_guard lock(mutex_);
  const std::vector<float>& values = factor(tensor, name).values;
  std::copy_n(values.begin() + static_cast<std::ptrdiff_t>(first), out.size(), out.begin());
}

const AdapterReader::Factor& AdapterReader::factor(const TensorSpec& tensor, const std::string& name) {
  if (factors_[0].name == name) return factors_[0];
  std::swap(factors_[0], factors_[1]);
  if (factors_[0].name == name) return factors_[0];
  const std::vector<std::int64_t> shape = tensor.checkpoint_shape();
  factors_[0] = {};
  std::vector<float>& values = factors_[0].values;
  values.resize(product(shape));
  const Turned turned(static_cast<std::size_t>(shape[0]), values.size());
  std::vector<float> piece(std::min(kSavedAtOnce, values.size()));
  for (std::size_t at = 0; at < values.size(); at += piece.size()) {
    piece.resize(std::min(piece.size(), values.size() - at));
    weights_->read_f32(name, at, piece);
    for (std::size_t i = 0; i < piece.size(); ++i) values[turned.here(at + i)] = piece[i];
  }
  factors_[0].name = name;
  return factors_[0];
}

namespace {

// A tensor of the model as it lies there.
TensorSpec beside_base(TensorSpec tensor) {
  tensor.name = name_beside_base(tensor);
  tensor.shape = shape_beside_base(tensor);
  tensor.all_rows = 0;
  return tensor;
}

// The name under which PEFT saves a matrix that it adds nothing to but an adapter.
std::string saved_base_name(const TensorSpec& tensor) {
  return "base_model.model." + linear_module(tensor) + ".base_layer.weight";
}

void expect_values_of_base(const TensorSpec& tensor, const Checkpoint& weights, const WeightSource& base) {
  std::vector<float> saved(kSavedAtOnce), own(kSavedAtOnce);
  const auto elements = static_cast<std::uint64_t>(tensor.elements());
  for (std::uint64_t first = 0; first < elements; first += kSavedAtOnce) {
    const std::size_t count = std::min<std::uint64_t>(kSavedAtOnce, elements - first);
    base(tensor, first, std::span(own).first(count));
    weights.read_f32(saved_base_name(tensor), first + static_cast<std::uint64_t>(tensor.first_element()),
                     std::span(saved).first(count));
    for (std::size_t i = 0; i < count; ++i)
      if (to_bf16(saved[i]) != to_bf16(own[i]))
        fail_input(weights.folder().string(),
                   saved_base_name(tensor) +
                       " is not the model's: the adapters belong to another model, or to one "
                       "whose vocabulary was changed");
  }
}

}  // namespace

// What the folder of `spec`'s adapters has.
void check_adapters(const ModelSpec& spec, const Checkpoint& weights, const WeightSource& base) {
  ModelSpec adapters;
  adapters.units.emplace_back();
  std::vector<TensorSpec>& tensors = adapters.units.front().tensors;
  std::vector<const TensorSpec*> saved;
  for (const UnitSpec& unit : spec.units)
    for (const TensorSpec& tensor : unit.tensors)
      if (!name_beside_base(tensor).empty()) {
        tensors.push_back(beside_base(tensor));
      } else if (weights.find(saved_base_name(tensor)) != nullptr) {
        saved.push_back(&tensor);
        tensors.push_back(tensor);
        tensors.back().name = saved_base_name(tensor);
      }
  // A tied embedding's second name is there, or not.
  if (const std::string head = tied_name_beside_base(spec); !head.empty() && weights.find(head) != nullptr) {
    tensors.push_back(spec.units.front().tensors.front());
    tensors.back().name = head;
  }
  check_tensors(adapters, weights, "adapter_config.json");
  for (const TensorSpec* tensor : saved) expect_values_of_base(*tensor, weights, base);
}

std::string write_adapter(const ModelSpec& spec, const fs::path& base, const std::string& base_weights,
                          const fs::path& folder, const MasterOf& master) {
  struct Tensor {
    TensorHeader header;
    std::vector<std::pair<int, int>> parts;  // unit and tensor: rows one after the other, or
    bool columns = false;                    // B and B0, or
    bool sum = false;                        // what is added to lengths, and these, or
    std::vector<std::int64_t> turned = {};   // its first dimension is to be the last: its shape in the model
  };
  std::vector<Tensor> tensors;
  for (std::size_t unit = 0; unit < spec.units.size(); ++unit)
    for (std::size_t index = 0; index < spec.units[unit].tensors.size(); ++index) {
      const TensorSpec& tensor = spec.units[unit].tensors[index];
      const std::string name = name_beside_base(tensor);
      if (name.empty()) continue;
      auto found = std::ranges::find_if(tensors, [&](const Tensor& each) { return each.header.name == name; });
      if (found == tensors.end())
        found = tensors.insert(found, {{.name = name, .dtype = Dtype::f32, .shape = shape_beside_base(tensor)}, {}});
      found->parts.emplace_back(static_cast<int>(unit), static_cast<int>(index));
      const AdapterPart part = adapter_part(tensor);
      if (part == AdapterPart::initial_a) found->header.shape[0] += tensor.shape[0];
      if (part == AdapterPart::initial_b) found->header.shape[1] += tensor.shape[1];
      found->columns = part == AdapterPart::initial_b;
      found->sum = part == AdapterPart::initial_magnitude;
      if (is_turned_beside_base(tensor)) found->turned = tensor.checkpoint_shape();
    }
  if (const std::string head = tied_name_beside_base(spec); !head.empty()) {
    const std::string table = name_beside_base(spec.units.front().tensors.front());
    Tensor copy = *std::ranges::find_if(tensors, [&](const Tensor& each) { return each.header.name == table; });
    copy.header.name = head;
    tensors.push_back(std::move(copy));
  }
  std::vector<TensorHeader> headers;
  for (const Tensor& tensor : tensors) {
    headers.push_back(tensor.header);
    headers.back().name = name_in_whole_model(spec, tensor.header.name);
  }
  CheckpointWriter writer(folder, headers, CheckpointWriter::Adapter{base_weights});
  for (const Tensor& tensor : tensors) {
    if (!tensor.turned.empty()) {
      std::vector<float> all(product(tensor.turned));
      const Turned turned(static_cast<std::size_t>(tensor.turned[0]), all.size());
      std::size_t at = 0;
      for (const auto& [unit, index] : tensor.parts)
        master(unit, index, [&](std::span<const float> values) {
          for (const float value : values) all.at(turned.there(at++)) = value;
        });
      writer.write(std::as_bytes(std::span(all)));
      continue;
    }
    if (!tensor.columns && !tensor.sum) {
      for (const auto& [unit, index] : tensor.parts)
        master(unit, index, [&](std::span<const float> values) { writer.write(std::as_bytes(values)); });
      continue;
    }
    const std::vector<float> first = whole(master, tensor.parts.at(0)), second = whole(master, tensor.parts.at(1));
    const std::vector<float> both = tensor.columns
                                        ? beside(first, second, static_cast<std::size_t>(tensor.header.shape[0]))
                                        : sum_of(first, second);
    writer.write(std::as_bytes(std::span(both)));
  }
  auto config = nlohmann::ordered_json::parse(adapter_config_beside_base(spec));
  if (!base.empty()) config["base_model_name_or_path"] = base.string();
  writer.finish(config.dump(2) + "\n");
  return writer.not_finite();
}

}  // namespace tierflow

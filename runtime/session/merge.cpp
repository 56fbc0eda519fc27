// Adapters added to the weights of their base, piece by piece.
#include <torch/utils.h>

#include <algorithm>
#include <map>

#include "runtime/base/exception.h"
#include "runtime/checkpoint/result_folder.h"
#include "runtime/checkpoint/source_folder.h"
#include "runtime/session/adapter_folder.h"
#include "runtime/session/session_impl.h"
#include "runtime/spec/expert_parameters.h"

namespace tierflow {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kPieceElements = 1 << 20;  // of a weight at once, or a whole row

// Hands on the fp32 values of a tensor of an adapter, or of one that is trained whole, in order.
using AdapterValues = std::function<void(const TensorSpec& tensor, const UseMaster& use)>;

torch::Tensor whole(const TensorSpec& tensor, const AdapterValues& values) {
  torch::Tensor all = torch::empty(tensor.shape, torch::kFloat32);
  auto* next = all.data_ptr<float>();
  values(tensor, [&](std::span<const float> part) { next = std::copy(part.begin(), part.end(), next); });
  return all;
}

// A model in a folder, and its specification with the adapters that are to be added to it.
struct Merge {
  ModelSpec spec;
  std::shared_ptr<const Checkpoint> base;
  SourceFolder source;
};

Merge open_merge(const fs::path& base, const AdapterConfig& config, const std::string& as) {
  ModelSpec spec = read_folder_spec(base, Tiling::none(), as);
  const auto weights = std::make_shared<const Checkpoint>(Checkpoint::open(base));
  check_tensors(spec, *weights);
  Merge merge{.spec = spec, .base = weights, .source = SourceFolder(spec, weights)};
  add_adapters(merge.spec, config);
  return merge;
}

// What is added to a matrix: left @ right * scale; undefined where it has no adapter. Then its rows (columns, where it
// is [in, out]) are brought to lengths, where these are defined.
struct Addend {
  torch::Tensor left, right, lengths;
  double scale = 1;
};

// The adapters of one unit. Holds the factors that were asked for.
class UnitAdapters {
 public:
  UnitAdapters(const ModelSpec& spec, const UnitSpec& unit, const AdapterValues& values)
      : spec_(spec), unit_(unit), values_(values) {}

  // Of each matrix of a weight: of a linear layer's one, or of all experts that lie in it.
  std::vector<Addend> of(const TensorSpec& weight) {
    if (const std::optional<ExpertPart> part = expert_part(spec_.config, weight)) return of_experts(*part);
    const Addend addend = factors(linear_module(weight));
    return {has_transposed_weights(spec_) ? transposed(addend) : addend};
  }

 private:
  static Addend transposed(const Addend& of) {
    if (!of.left.defined()) return of;
    return {
        .left = of.right.t().contiguous(), .right = of.left.t().contiguous(), .lengths = of.lengths, .scale = of.scale};
  }

  // B and A, with what stands beside them.
  const Addend& factors(const std::string& path) {
    const auto [found, is_new] = held_.try_emplace(path);
    Addend& addend = found->second;
    if (!is_new || path.empty()) return addend;
    torch::Tensor &a = addend.right, &b = addend.left, &lengths = addend.lengths;
    for (const TensorSpec& factor : unit_.tensors) {
      if (!is_adapter(factor) || linear_module(factor) != path) continue;
      const AdapterPart part = adapter_part(factor);
      const torch::Tensor values = whole(factor, values_);
      if (is_table_adapter(factor)) {  // rows of A for the rows of W, which B brings to their width
        (part == AdapterPart::a ? b : a) = part == AdapterPart::a ? values : values.t();
        addend.scale = factor.scale;
        continue;
      }
      if (part == AdapterPart::a) a = values;
      if (part == AdapterPart::b) b = values;
      if (part == AdapterPart::b) addend.scale = factor.scale;
      if (part == AdapterPart::initial_a) a = torch::cat({a, values}, 0);
      if (part == AdapterPart::initial_b) b = torch::cat({b, -values}, 1);
      if (part == AdapterPart::magnitude) lengths = values;
      if (part == AdapterPart::initial_magnitude) lengths = lengths + values;
    }
    return addend;
  }

  std::vector<Addend> of_experts(const ExpertPart& part) {
    const Addend& all = factors(part.parameter);
    std::vector<Addend> addends(static_cast<std::size_t>(part.experts));
    if (!all.left.defined()) return addends;
    for (std::int64_t i = 0; i < part.experts; ++i) {
      const Addend one{.left = all.left.select(0, part.expert + i).narrow(0, part.row, part.rows),
                       .right = all.right.select(0, part.expert + i),
                       .lengths = {},
                       .scale = all.scale};
      addends[static_cast<std::size_t>(i)] = spec_.config.experts.transposed ? transposed(one) : one;
    }
    return addends;
  }

  const ModelSpec& spec_;
  const UnitSpec& unit_;
  const AdapterValues& values_;
  std::map<std::string, Addend> held_;  // by what they stand beside
};

// Pieces of one weight with its adapters added, rows [row, row + count) of one of its matrices each.
class Sum {
 public:
  Sum(const Checkpoint& base, const TensorSpec& tensor, const std::vector<Addend>& addends, bool transposed)
      : base_(base), tensor_(tensor), addends_(addends), transposed_(transposed) {
    // Where nothing is added, any cut will do.
    const auto matrices = static_cast<std::int64_t>(addends.size());
    const bool added = addends.front().left.defined();
    rows_ = added ? tensor.shape[tensor.shape.size() - 2] : tensor.elements() / matrices;
    columns_ = rows_ == 0 ? 0 : tensor.elements() / matrices / rows_;
    if (addends.front().lengths.defined() && transposed) {
      torch::Tensor squares = torch::zeros({columns_}, torch::kFloat64);
      each([&](std::int64_t, const torch::Tensor& piece) { squares += piece.to(torch::kFloat64).square_().sum(0); });
      lengths_now_ = squares.sqrt_().to(torch::kFloat32);
    }
  }

  void each(const std::function<void(std::int64_t row, const torch::Tensor& piece)>& use) const {
    const std::int64_t step = std::max<std::int64_t>(1, kPieceElements / std::max<std::int64_t>(columns_, 1));
    std::int64_t before = 0;
    for (const Addend& addend : addends_) {
      for (std::int64_t row = 0; row < rows_; row += step) {
        const std::int64_t count = std::min(step, rows_ - row);
        torch::Tensor piece = torch::empty({count, columns_}, torch::kFloat32);
        base_.read_f32(tensor_, static_cast<std::uint64_t>((before + row) * columns_),
                       {piece.data_ptr<float>(), static_cast<std::size_t>(piece.numel())});
        if (addend.left.defined()) piece.addmm_(addend.left.narrow(0, row, count), addend.right, 1, addend.scale);
        use(row, piece);
      }
      before += rows_;
    }
  }

  // Brings them to their lengths.
  void scale(std::int64_t row, torch::Tensor piece) const {
    const torch::Tensor& lengths = addends_.front().lengths;
    if (!lengths.defined()) return;
    const torch::Tensor now = transposed_ ? lengths_now_ : torch::linalg_vector_norm(piece, 2, {1});
    const torch::Tensor wanted = transposed_ ? lengths : lengths.narrow(0, row, piece.size(0));
    const torch::Tensor gain = wanted / now.clamp_min(1e-30);
    piece.mul_(transposed_ ? gain : gain.unsqueeze(1));
  }

 private:
  const Checkpoint& base_;
  const TensorSpec& tensor_;
  const std::vector<Addend>& addends_;  // of each of its matrices
  const bool transposed_;
  std::int64_t rows_ = 1, columns_ = 1;  // of one
  torch::Tensor lengths_now_;            // of the columns
};

// Writes the model with the adapters added to its weights, in fp32, rounded to bf16 once, and with the modules that
// were trained whole.
std::string write_merged(const Merge& merge, const AdapterValues& values, const fs::path& folder,
                         const Progress& progress) {
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
  const auto write = [&](const TensorSpec& tensor, const torch::Tensor& piece) {
    const torch::Tensor words = dtype_of(tensor) == Dtype::f32 ? piece : piece.to(torch::kBFloat16);
    writer.write({static_cast<const std::byte*>(words.data_ptr()), static_cast<std::size_t>(words.nbytes())});
    done += static_cast<std::uint64_t>(piece.numel());
    if (progress) progress("adding adapters", done, total);
  };
  for (const UnitSpec& unit : spec.units) {
    UnitAdapters adapters(spec, unit, values);
    for (const TensorSpec& tensor : unit.tensors) {
      if (is_adapter(tensor)) continue;
      if (tensor.trainable) {
        values(tensor, [&](std::span<const float> part) {
          write(tensor, torch::from_blob(const_cast<float*>(part.data()), {static_cast<std::int64_t>(part.size())}));
        });
        continue;
      }
      const std::vector<Addend> addends = adapters.of(tensor);
      const Sum sum(*merge.base, tensor, addends, transposed);
      sum.each([&](std::int64_t row, const torch::Tensor& piece) {
        sum.scale(row, piece);
        write(tensor, piece);
      });
    }
  }
  merge.source.write(writer, {}, progress);
  writer.finish(merge.source.config_json());
  return writer.not_finite();
}

}  // namespace

std::string merge_adapter(const fs::path& base, const fs::path& adapter, const fs::path& folder,
                          const Progress& progress, const std::string& as) {
  const AdapterFolder found = open_adapter(adapter);
  const Merge merge = open_merge(base, found.config, as);
  check_adapters(merge.spec, *found.weights, [&](const TensorSpec& tensor, std::uint64_t first, std::span<float> out) {
    merge.base->read_f32(tensor, first, out);
  });
  AdapterReader reader(found.weights);
  return write_merged(
      merge,
      [&](const TensorSpec& tensor, const UseMaster& use) {
        const auto elements = static_cast<std::uint64_t>(tensor.elements());
        std::vector<float> part(std::min<std::uint64_t>(kPieceElements, elements));
        // The magnitudes there are whole.
        const bool none = adapter_part(tensor) == AdapterPart::initial_magnitude;
        for (std::uint64_t first = 0; first < elements; first += part.size()) {
          const std::span<float> values(part.data(), std::min<std::uint64_t>(part.size(), elements - first));
          if (!none) reader.read(tensor, first, values);
          use(values);
        }
      },
      folder, progress);
}

std::string merge_model(const fs::path& base, const fs::path& adapter, const fs::path& folder, const Progress& progress,
                        const std::string& as) {
  std::error_code ignored;
  const bool has_template = fs::is_regular_file(adapter / "chat_template.jinja", ignored);
  const CompanionFiles companions(base, has_template ? adapter : fs::path());
  ResultFolder out(folder);
  out.begin();
  companions.copy_to(out.path());
  std::string broken = merge_adapter(base, adapter, out.path(), progress, as);
  out.finish();
  return broken;
}

std::string Session::export_merged(const fs::path& base, const fs::path& folder, const Progress& progress) {
  impl_->expect_first_values();
  const ModelSpec& spec = impl_->model->spec();
  if (!is_written_beside_base(spec)) fail_usage("the model has no adapters: export_hf() writes it");
  impl_->flush();
  return write_merged(
      open_merge(base, parse_adapter_config(spec.adapter_config_json, "the model's adapters"), spec.read_as),
      [&](const TensorSpec& tensor, const UseMaster& use) {
        for (std::size_t unit = 0; unit < spec.units.size(); ++unit)
          for (std::size_t i = 0; i < spec.units[unit].tensors.size(); ++i)
            if (spec.units[unit].tensors[i].name == tensor.name)
              impl_->state->read_master(static_cast<int>(unit), static_cast<int>(i), use);
      },
      folder, progress);
}

}  // namespace tierflow

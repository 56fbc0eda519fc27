#include "runtime/models/products.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <optional>
#include <vector>

namespace tierflow::models {
namespace {

using at::Tensor;

constexpr std::int64_t kTileElements = 1 << 21;  // of each operand and of the result
constexpr std::int64_t kTileRows = 1024;
constexpr std::size_t kAlignment = 64;

// Whether torch multiplies bf16 by more than single elements: its own answer.
bool torch_multiplies_bf16() {
  static const bool answer = [] {
    const auto asks = c10::Dispatcher::singleton().findSchema({"mkldnn::_is_mkldnn_bf16_supported", ""});
    return asks && asks->typed<bool()>().call();
  }();
  return answer;
}

class Tile {
 public:
  // fp32 [rows, columns], row by row; what it held is lost.
  Tensor of(std::int64_t rows, std::int64_t columns) {
    if (const std::int64_t wanted = rows * columns; wanted > elements_) {
      const std::size_t bytes =
          (sizeof(float) * static_cast<std::size_t>(wanted) + kAlignment - 1) / kAlignment * kAlignment;
      memory_.reset(static_cast<float*>(std::aligned_alloc(kAlignment, bytes)));
      elements_ = memory_ ? wanted : 0;
      TORCH_CHECK_WITH(OutOfMemoryError, memory_ != nullptr, "no memory for a tile of a matrix product");
    }
    return at::from_blob(memory_.get(), {rows, columns}, at::kFloat);
  }

 private:
  struct Free {
    void operator()(float* memory) const { std::free(memory); }
  };
  std::unique_ptr<float[], Free> memory_;
  std::int64_t elements_ = 0;
};

struct Tiles {
  Tile a, b, result;
};

Tiles& of_this_thread() {
  thread_local Tiles tiles;
  return tiles;
}

// The matrix in fp32, as it lies: row by row or column by column.
Tensor widened(Tile& tile, const Tensor& matrix) {
  if (matrix.stride(0) == 1 && matrix.stride(1) != 1)
    return tile.of(matrix.size(1), matrix.size(0)).copy_(matrix.t()).t();
  return tile.of(matrix.size(0), matrix.size(1)).copy_(matrix);
}

class InFp32 : public torch::autograd::Function<InFp32> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, const Tensor& w,
                        const std::optional<Tensor>& bias) {
    context->save_for_backward({x, w});
    context->saved_data["biased"] = bias.has_value();
    Tensor y = at::empty({x.size(0), w.size(0)}, x.options());
    product_in_tiles(y, x, w.t(), false, bias.value_or(Tensor()));
    return y;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& d) {
    const auto saved = context->get_saved_variables();
    const Tensor &x = saved[0], &w = saved[1], &d_y = d[0];
    torch::autograd::variable_list out(3);
    if (context->needs_input_grad(0)) product_in_tiles(out[0] = at::empty_like(x), d_y, w, false, {});
    if (context->needs_input_grad(1)) product_in_tiles(out[1] = at::empty_like(w), d_y.t(), x, false, {});
    if (context->saved_data["biased"].toBool() && context->needs_input_grad(2)) out[2] = d_y.sum(0);
    return out;
  }
};

}  // namespace

bool multiplied_in_fp32(const Tensor& a) {
  return a.scalar_type() == at::kBFloat16 && a.is_cpu() && !torch_multiplies_bf16();
}

void product_in_tiles(const Tensor& out, const Tensor& a, const Tensor& b, bool adds, const Tensor& bias) {
  const at::NoGradGuard no_grad;
  const std::int64_t m = a.size(0), k = a.size(1), n = b.size(1);
  if (m == 0) return;
  const std::int64_t most = std::max<std::int64_t>(1, kTileElements / std::max<std::int64_t>(1, k));
  const std::int64_t rows = std::min({most, m, kTileRows}), columns = std::min({most, n, kTileElements / rows});
  Tiles& tiles = of_this_thread();
  for (std::int64_t column = 0; column < n; column += columns) {
    const std::int64_t width = std::min(columns, n - column);
    const Tensor right = widened(tiles.b, b.narrow(1, column, width));
    for (std::int64_t row = 0; row < m; row += rows) {
      const std::int64_t height = std::min(rows, m - row);
      Tensor result = tiles.result.of(height, width);
      at::mm_out(result, widened(tiles.a, a.narrow(0, row, height)), right);
      const Tensor place = out.narrow(0, row, height).narrow(1, column, width);
      if (adds) result.add_(place);
      if (bias.defined()) result.add_(bias.narrow(0, column, width));
      place.copy_(result);
    }
  }
}

Tensor matrix_product(const Tensor& a, const Tensor& b) {
  if (!multiplied_in_fp32(a)) return at::mm(a, b);
  Tensor out = at::empty({a.size(0), b.size(1)}, a.options());
  product_in_tiles(out, a, b, false, {});
  return out;
}

void matrix_product_into(Tensor& out, const Tensor& a, const Tensor& b) {
  if (multiplied_in_fp32(a)) return product_in_tiles(out, a, b, false, {});
  at::mm_out(out, a, b);
}

void add_matrix_product(Tensor& sum, const Tensor& a, const Tensor& b) {
  if (multiplied_in_fp32(a)) return product_in_tiles(sum, a, b, true, {});
  sum.addmm_(a, b);
}

Tensor linear_map_in_tiles(const Tensor& x, const Tensor& w, const Tensor& bias) {
  std::vector<std::int64_t> shape = x.sizes().vec();
  shape.back() = w.size(0);
  return InFp32::apply(x.reshape({-1, x.size(-1)}), w, bias.defined() ? std::optional(bias) : std::nullopt).view(shape);
}

Tensor linear_map(const Tensor& x, const Tensor& w, const Tensor& bias) {
  if (multiplied_in_fp32(x)) return linear_map_in_tiles(x, w, bias);
  return bias.defined() ? at::linear(x, w, bias) : at::linear(x, w);
}

}  // namespace tierflow::models

#pragma once
// Matrix products of the models' layers. torch's, but for bf16 on a CPU for which torch has no bf16 product: without
// AVX-512 on x86 (most desktops) it multiplies element by element, which takes 8 to over 100 times as long as fp32
// (benchmarks/step/products.py). There operands are widened, multiplied in fp32 in tiles, and the result is rounded to
// bf16 once, as torch's own product does. Tiles depend on shapes alone, and what they lie in is aligned, so the same
// operands give the same bits. Each thread that computes keeps up to 24 MiB for its tiles, outside of the device's
// budget, as torch's own products do.
#include <ATen/core/Tensor.h>

namespace tierflow::models {

// a b: [m, k], [k, n] -> [m, n].
at::Tensor matrix_product(const at::Tensor& a, const at::Tensor& b);
// Writes a b to out [m, n].
void matrix_product_into(at::Tensor& out, const at::Tensor& a, const at::Tensor& b);
// sum [m, n] += a b, rounded once.
void add_matrix_product(at::Tensor& sum, const at::Tensor& a, const at::Tensor& b);
// x w^T + bias: [..., k], [n, k], [n] or undefined -> [..., n]. Differentiable, as those above are not.
at::Tensor linear_map(const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias = {});

// Whether products of two tensors of this kind are computed in fp32 tiles.
bool multiplied_in_fp32(const at::Tensor& a);
// How they are computed; all bf16 on the CPU. out [m, n] = a b, + out where `adds`, + bias [n] where defined.
void product_in_tiles(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, bool adds,
                      const at::Tensor& bias);
at::Tensor linear_map_in_tiles(const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias);

}  // namespace tierflow::models

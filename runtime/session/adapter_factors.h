#pragma once
// First values of adapters as factors of a matrix [out, in]. By LAPACK, in fp32, on the CPU: the same bits for the same
// matrix and seed, whatever thread calls and however many torch has: one computes, one call at a time. Memory:
// loading_bytes().
#include <torch/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/spec/adapter_config.h"

namespace tierflow {

// A0 [rank, in] and B0 [out, rank], rounded to bf16: words in row-major order.
struct Factors {
  std::vector<std::uint16_t> a, b;
};

struct FactorsOf {
  std::string name;  // of the weight: it decides, with the seed, what a randomised decomposition begins with
  std::int64_t rank = 0;
  double scale = 1;         // of the adapter
  bool transposed = false;  // W is stored as [in, out]
  std::uint64_t seed = 0;
};

// Of the weight W, whose values are finite:
//   pissa: of the singular value decomposition W = U S V^T the r largest, A0 = sqrt(S_r / s) V_r^T and
//          B0 = U_r sqrt(S_r / s) (Meng et al., PiSSA, 2024). With iterations, of the randomised decomposition (Halko,
//          Martinsson, Tropp, Finding structure with randomness, 2011, algorithms 4.4 and 5.1), r + 8 wide;
//   olora: of W = Q R the first r columns of Q and rows of R, B0 = Q_r and A0 = R_r (Büyükakyüz, OLoRA, 2024).
Factors factors_of_weight(const torch::Tensor& w, const AdapterConfig& config, const FactorsOf& of);

// Of the gradient G of W (Wang et al., LoRA-GA, 2024): with the randomised decomposition G = U S V^T, 4 r wide and with
// four iterations:
//   lora_ga:      A0 = f V_{1..r}^T and B0 = f U_{r+1..2r}, f = out^(1/4) / sqrt(gamma), gamma = 16;
//   peft_lora_ga: A0 = V_{1..r}^T and B0 = f U_{r+1..2r} S_{r+1..2r} (PEFT 0.21, LoraLayer.lora_ga_init with the
//                 defaults of LoraGAConfig: direction ArB2r, scale stable). In f, PEFT takes for `out` the rows of the
//                 weight as it is stored: the inputs of GPT-2's layers.
// Throws Exception (kind numeric) naming the weight, where G is not finite.
Factors factors_of_gradient(const torch::Tensor& gradient, AdapterInit init, const FactorsOf& of);

// GaLore's projector of G (Zhao et al., GaLore, 2024, type "std" of its repository), the first singular vectors on the
// shorter side: out < in: B = U_{1..r}, else A = V_{1..r}^T; the other factor is empty. By the randomised
// decomposition, as wide as basis_columns() says and with two iterations, on the device where G is. Both are empty
// where G is not finite.
Factors projector_of_gradient(const torch::Tensor& gradient, const FactorsOf& of);

}  // namespace tierflow

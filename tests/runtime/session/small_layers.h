#pragma once
// Layers of one's own: a table, a product and a loss.
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <memory>

#include "runtime/session/layers.h"

namespace tierflow::testing {

inline constexpr int kWidth = 32, kVocabulary = 96;

struct Table : Layer {
  torch::nn::Embedding table = register_module("table", torch::nn::Embedding(kVocabulary, kWidth));
  Carry forward(const Carry&, const Shared& shared) override { return {table(shared.ids)}; }
};
struct Product : Layer {
  torch::nn::Linear product = register_module("product", torch::nn::Linear(kWidth, kWidth));
  Carry forward(const Carry& carry, const Shared&) override { return {carry[0] + product(carry[0])}; }
};
struct Loss : Layer {
  torch::nn::Linear out = register_module("out", torch::nn::Linear(kWidth, kVocabulary));
  Carry forward(const Carry& carry, const Shared& shared) override {
    const auto sum = torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum);
    return {torch::nn::functional::cross_entropy(out(carry[0]).to(torch::kFloat32).flatten(0, 1),
                                                 shared.labels.flatten(), sum)};
  }
};

inline constexpr std::uint64_t kTableBytes = 8 << 20;
// And a constant that a session has on its device.
struct WithTable : Product {
  torch::Tensor table = register_buffer("table", torch::ones({kTableBytes / 2 / kWidth, kWidth}, torch::kBFloat16));
  Carry forward(const Carry& carry, const Shared& shared) override {
    return {Product::forward(carry, shared)[0] * table[0]};
  }
};

}  // namespace tierflow::testing

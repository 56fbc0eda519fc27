#pragma once
// Values that a decoder's blocks pass from one operation to the next, and keep from their forward for their backward.
#include <ATen/ATen.h>

#include <vector>

#include "runtime/models/decoder_attention.h"
#include "runtime/models/decoder_mlp.h"
#include "runtime/models/layered_model.h"
#include "runtime/models/norm.h"

namespace tierflow::models {

// What the gradient of a half needs from its forward.
template <class Half>
struct KeptHalf {
  at::Tensor x, normed;  // its input [tokens, hidden], and normed
  Norm::Kept norm;
  typename Half::Kept inner;
  at::Tensor mask;        // where dropout follows: what it leaves of what the half adds
  at::Tensor under_norm;  // where a norm follows: what it takes
  Norm::Kept out_norm;
};

// base + added, which is not summed yet; base alone where `added` is undefined.
struct OpenSum {
  at::Tensor base, added;

  at::Tensor closed() const { return added.defined() ? base + added : base; }
};

// A block's or, in a half of one, the half's. A block's attention takes the stage's input, which is not kept.
struct KeptBlock final : KeptActivations {
  const DecoderAttention* attends = nullptr;
  const DecoderMlp* expands = nullptr;
  bool parallel = false;
  KeptHalf<DecoderAttention> attention;
  KeptHalf<DecoderMlp> mlp;

  std::vector<at::Tensor> essentials() const override {
    std::vector<at::Tensor> tensors;
    const auto add = [&](const at::Tensor& tensor) {
      if (tensor.defined()) tensors.push_back(tensor);
    };
    if (attends != nullptr) {
      tensors = attends->essentials(attention.inner);
      add(attention.under_norm);
    }
    if (expands == nullptr) return tensors;
    if (attends != nullptr && !parallel) add(mlp.x);
    for (const at::Tensor& tensor : expands->essentials(mlp.inner)) add(tensor);
    add(mlp.under_norm);
    return tensors;
  }
};

}  // namespace tierflow::models

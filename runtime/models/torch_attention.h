#pragma once
// Attention by torch's own kernels, for the cases that nothing in device_attention.h computes.
#include "runtime/models/attention.h"

namespace tierflow::models {

// As attention(): scaled_dot_product_attention, which is called for each document. With a softcap the scores exist
// whole, [batch, heads, sequence, sequence] (each document apart): slower, and memory grows with the square of the
// sequence.
at::Tensor torch_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionRules& rules,
                           double dropout);

}  // namespace tierflow::models

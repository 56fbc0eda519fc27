#pragma once
// The factor of each token's loss in the sum whose gradient the head computes.
#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tierflow::models {

class TokenScale {
 public:
  // The same factor for all tokens.
  TokenScale(double all) : all_(all) {}  // NOLINT(google-explicit-constructor): a number is a scale
  // each: [tokens] fp64 on the host, contiguous.
  explicit TokenScale(const at::Tensor& each) : each_(each) {}

  bool uniform() const { return !each_.defined(); }
  double all() const { return all_; }  // if all tokens have one

  // Calls use(first token, tokens, scale) for each stretch of one scale in [first, first + tokens).
  template <class Use>
  void for_each_stretch(std::int64_t first, std::int64_t tokens, Use use) const {
    if (uniform()) return use(first, tokens, all_);
    const double* each = each_.const_data_ptr<double>();
    for (std::int64_t at = first, end = first + tokens; at < end;) {
      std::int64_t next = at + 1;
      while (next < end && each[next] == each[at]) ++next;
      use(at, next - at, each[at]);
      at = next;
    }
  }

 private:
  double all_ = 1;
  at::Tensor each_;
};

}  // namespace tierflow::models

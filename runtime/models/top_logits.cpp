#include "runtime/models/top_logits.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <limits>

#include "runtime/models/grain.h"
#include "runtime/models/kernels.h"
#include "runtime/models/row_kernels.h"

namespace tierflow::models {

TopLogits no_top_logits(std::int64_t tokens, std::int64_t top, at::Device device) {
  const auto options = at::TensorOptions().device(device);
  return {.values = at::full({tokens, top}, -std::numeric_limits<double>::infinity(), options.dtype(at::kFloat)),
          .ids = at::full({tokens, top}, std::numeric_limits<std::int32_t>::max(), options.dtype(at::kInt))};
}

void top_logits(const at::Tensor& logits, std::int64_t first, const TopLogits& top) {
  if (row_kernels::take(logits)) return row_kernels::top_logits(logits, first, top);
  const std::int64_t width = logits.size(1), wanted = top.ids.size(1);
  if (logits.is_cpu() && logits.scalar_type() == at::kBFloat16 && logits.is_contiguous()) {
    const auto* words = static_cast<const std::uint16_t*>(logits.const_data_ptr());
    float* values = top.values.mutable_data_ptr<float>();
    std::int32_t* ids = top.ids.mutable_data_ptr<std::int32_t>();
    at::parallel_for(0, logits.size(0), grain_rows(width), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row)
        kernels::top_logits(words + row * width, first, width, values + row * wanted, ids + row * wanted, wanted);
    });
    return;
  }
  for_each_slice(logits, [&](std::int64_t row, std::int64_t rows) {
    const at::Tensor values = top.values.narrow(0, row, rows), ids = top.ids.narrow(0, row, rows);
    const at::Tensor here = at::arange(first, first + width, ids.options()).expand({rows, width});
    const auto [sorted, place] = at::cat({values, logits.narrow(0, row, rows).to(at::kFloat)}, 1)
                                     .sort(/*stable=*/true, /*dim=*/1, /*descending=*/true);
    const at::Tensor found = at::cat({ids, here}, 1).gather(1, place.narrow(1, 0, wanted));
    values.copy_(sorted.narrow(1, 0, wanted));
    ids.copy_(found);
  });
}

}  // namespace tierflow::models

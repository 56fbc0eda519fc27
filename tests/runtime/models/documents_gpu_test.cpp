// Packed rows on a GPU, where one call takes all documents, against the documents alone. Skips without one.
#include <gtest/gtest.h>
#include <torch/utils.h>

#include "runtime/device/device_memory.h"
#include "runtime/models/attention.h"
#include "swap/device.h"
#include "tests/runtime/models/fixture.h"

namespace tierflow::testing {
namespace {

using torch::Tensor;

// The result, and the gradients of q, k and v.
std::vector<Tensor> attend(const std::vector<Tensor>& from, const models::AttentionRules& rules) {
  std::vector<Tensor> leaves;
  for (const Tensor& x : from) leaves.push_back(x.detach().clone().requires_grad_());
  const Tensor out = models::attention(leaves[0], leaves[1], leaves[2], rules, 0.0);
  out.backward(leaves[3].detach());
  return {out.detach(), leaves[0].grad(), leaves[1].grad(), leaves[2].grad()};
}

TEST(DocumentsOnGpu, AttendToThemselvesAlone) {
  if (!swap::cuda_available()) GTEST_SKIP() << "no CUDA device here";
  DeviceMemory::cuda();  // loads torch's library
  torch::manual_seed(6);
  const MicroBatch rows = packed({{128, 64, 1, 107}, {300}, {37, 5, 257, 1}});
  for (const std::int64_t window : {0, 20}) {
    std::vector<Tensor> all;
    for (const std::int64_t heads : {4, 2, 2, 4})
      all.push_back(torch::randn({3, 300, heads, 64}).to(torch::kCUDA, torch::kBFloat16));
    const auto got = attend(all, {.window = window, .documents = rows.documents()});
    for (const Document& document : rows.documents()) {
      SCOPED_TRACE(::testing::Message() << "row " << document.row << " from " << document.begin << ": "
                                        << document.length << ", window " << window);
      const auto cut = [&](const Tensor& x) {
        return x.narrow(0, document.row, 1).narrow(1, document.begin, document.length);
      };
      std::vector<Tensor> exact;
      for (const Tensor& x : all) exact.push_back(cut(x).cpu().to(torch::kDouble));
      const auto alone = attend(exact, {.window = window});
      for (std::size_t i = 0; i < alone.size(); ++i) {
        const Tensor difference = cut(got[i]).cpu().to(torch::kDouble) - alone[i];
        EXPECT_LT(difference.norm().item<double>(), 2e-2 * alone[i].norm().item<double>() + 0.3) << i;
      }
    }
  }
}

}  // namespace
}  // namespace tierflow::testing

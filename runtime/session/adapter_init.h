#pragma once
// The first values of adapters that have them from the weights beside which they stand.
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/checkpoint/weight_source.h"
#include "runtime/spec/adapter_config.h"

namespace tierflow {

// For the adapters of `spec`, first values A0 and B0 of each layer's W [out, in], of rank r and with the adapter's
// scale s, rounded to bf16:
//   pissa: of the singular value decomposition W = U S V^T the r largest, A0 = sqrt(S_r / s) V_r^T and
//          B0 = U_r sqrt(S_r / s) (Meng et al., PiSSA, 2024). With iterations, of the randomised decomposition (Halko,
//          Martinsson, Tropp, Finding structure with randomness, 2011, algorithms 4.4 and 5.1), r + 8 wide;
//   olora: of W = Q R the first r columns of Q and rows of R, B0 = Q_r and A0 = R_r (Büyükakyüz, OLoRA, 2024).
// W is what the base holds in its format. Both are LAPACK's, in fp32, on the CPU: the same bits for the same W, seed
// and number of threads. Other tensors have their values from `weights`. Takes memory for one W and what its
// decomposition needs, and for the factors of a few layers. The source throws Exception (kind input) naming the weight,
// where it is not finite.
WeightSource adapters_from_base(const ModelSpec& spec, const AdapterConfig& config, std::uint64_t seed,
                                WeightSource weights);

// The lengths of the rows [out] of each layer's W, as the base holds it: summed in fp64, row by row.
class RowLengths {
 public:
  // spec: with the base's formats. weights: of the base.
  RowLengths(const ModelSpec& spec, WeightSource weights);
  // Elements [first, first + out.size()) of those beside which the adapter's tensor stands. Any thread may call it.
  void read(const TensorSpec& tensor, std::uint64_t first, std::span<float> out);

 private:
  const bool transposed_;
  const WeightSource weights_;
  std::map<std::string, TensorSpec> layers_;  // weights by module
  std::mutex mutex_;
  std::map<std::string, std::vector<float>> lengths_;
};

}  // namespace tierflow

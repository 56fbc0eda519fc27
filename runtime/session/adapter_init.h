#pragma once
// The first values of adapters that are computed from their layers' weights.
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/checkpoint/weight_source.h"
#include "runtime/spec/adapter_config.h"

namespace tierflow {

// The values of the linear layers of a model, as its base holds them in its format.
class BaseValues {
 public:
  // spec: with the base's formats. The sources are of the base.
  BaseValues(const ModelSpec& spec, WeightSource weights, StoredSource stored);
  const TensorSpec& weight(const std::string& module) const { return layers_.at(module); }
  const WeightSource& weights() const { return weights_; }
  // Hands on the values of a layer's weight in its own order, in pieces that are changed by the next. Holds a piece
  // and, of a format, the stored bytes.
  void each(const TensorSpec& weight, const std::function<void(std::span<const float> values)>& use) const;

 private:
  const WeightSource weights_;
  const StoredSource stored_;
  std::map<std::string, TensorSpec> layers_;  // weights by module
};

// For the adapters of `spec`, first values A0 and B0 of each layer's W as adapter_factors.h says; before the gradient
// has its gradient, zeros. Other tensors have their values from `base`. Takes memory for one W and what its
// decomposition needs, and for the factors of a unit. The source throws Exception (kind input) naming the weight, where
// it is not finite.
WeightSource adapters_from_base(const ModelSpec& spec, const AdapterConfig& config, std::uint64_t seed,
                                BaseValues base);

// The lengths of the rows [out] of each layer's W, as the base holds it: summed in fp64, row by row. Of one unit at
// once.
class RowLengths {
 public:
  RowLengths(const ModelSpec& spec, BaseValues base);
  // Elements [first, first + out.size()) of the lengths for the layer of the adapter's tensor. Any thread may call it.
  void read(const TensorSpec& tensor, std::uint64_t first, std::span<float> out);

 private:
  std::vector<float> lengths_of(const TensorSpec& weight) const;

  const bool transposed_;
  const BaseValues base_;
  std::map<std::string, int> units_;  // by module
  std::mutex mutex_;
  int unit_ = -1;  // the unit whose lengths are in memory
  std::map<std::string, std::vector<float>> lengths_;
};

}  // namespace tierflow

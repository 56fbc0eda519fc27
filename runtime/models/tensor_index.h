#pragma once
// The positions of a stage's tensors in its Weights, found once by name, so that blocks read weights by position.
#include <string>
#include <string_view>
#include <vector>

#include "runtime/spec/model_spec.h"

namespace tierflow::models {

class TensorIndex {
 public:
  TensorIndex() = default;
  // The tensors of the stage's units, unit after unit.
  TensorIndex(const ModelSpec& spec, int stage);
  // The tensors of one unit.
  explicit TensorIndex(const UnitSpec& unit) { add(unit); }

  // Position of the tensor whose checkpoint name is `end` or ends with "." + `end`; -1 where there is none.
  int find(std::string_view end) const;
  // The same; throws Exception (kind input) where there is none.
  int at(std::string_view end) const;
  // TensorSpec::scale of the tensor there.
  double scale(int position) const { return scales_[static_cast<std::size_t>(position)]; }
  // Whether linear layers of the stage's block are stored as [in, out].
  bool transposed() const { return transposed_; }

 private:
  void add(const UnitSpec& unit);

  std::string stage_;
  std::vector<std::string> names_;
  std::vector<double> scales_;
  bool transposed_ = false;
};

}  // namespace tierflow::models

#pragma once
// Options that Python gives by name.
#include <torch/csrc/utils/pybind.h>

#include <string>

#include "runtime/base/exception.h"

namespace tierflow::bindings {

// Takes what a dictionary names, each name once; what it does not name stays as it was. The dictionary outlives it.
class Named {
 public:
  explicit Named(const pybind11::dict& options) : options_(options) {}

  template <class Field>
  void take(const char* name, Field& field) {
    known_ += std::string(known_.empty() ? "" : ", ") + name;
    if (!options_.contains(name)) return;
    field = options_[name].template cast<Field>();
    ++taken_;
  }
  // Throws Exception (kind usage), with the names that were asked for, where there is one that nothing took.
  void expect_no_more() const {
    if (taken_ != options_.size()) fail_usage("an option of the session is unknown; there are " + known_);
  }

 private:
  const pybind11::dict& options_;
  std::string known_;
  std::size_t taken_ = 0;
};

}  // namespace tierflow::bindings

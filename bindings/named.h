#pragma once
// Options that Python gives by name.
#include <torch/csrc/utils/pybind.h>

#include <set>
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
    taken_.insert(name);
  }
  // Throws Exception (kind usage), with the names that were asked for, where there is one that nothing took.
  void expect_no_more() const {
    for (const auto& [name, value] : options_)
      if (const std::string text = pybind11::str(name); !taken_.contains(text))
        fail_usage("an option of the session is unknown: \"" + text + "\"; there are " + known_);
  }

 private:
  const pybind11::dict& options_;
  std::string known_;
  std::set<std::string> taken_;
};

}  // namespace tierflow::bindings

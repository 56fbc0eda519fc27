#pragma once
// Options that Python gives by name.
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "runtime/base/exception.h"

namespace tierflow::bindings {

// What an option of this type takes, in words.
template <class Field>
constexpr const char* what_it_takes() {
  if (std::is_same_v<Field, bool>) return "True or False";
  if (std::is_unsigned_v<Field>) return "an integer, 0 or more";
  if (std::is_integral_v<Field>) return "an integer";
  if (std::is_floating_point_v<Field>) return "a number";
  if (std::is_same_v<Field, std::string>) return "a text";
  if (std::is_same_v<Field, std::optional<double>>) return "a number, or None";
  if (std::is_same_v<Field, std::pair<double, double>>) return "two numbers";
  if (std::is_same_v<Field, std::vector<std::string>>) return "a list of texts";
  if (std::is_same_v<Field, std::vector<std::int64_t>>) return "a list of integers";
  if (std::is_same_v<Field, std::vector<double>>) return "a list of numbers";
  return "a dictionary";
}

// What Python gives for an option; for a list of texts one text is a list of it. Throws Exception (kind usage), which
// names the option and what it takes.
template <class Field>
Field value_of(const std::string& name, const pybind11::handle& value) {
  if constexpr (std::is_same_v<Field, std::vector<std::string>>)
    if (pybind11::isinstance<pybind11::str>(value)) return {value.cast<std::string>()};
  try {
    return value.cast<Field>();
  } catch (const pybind11::cast_error&) {
    std::string given = pybind11::repr(value);
    if (given.size() > 80 || given.find('\n') != std::string::npos)
      given = "one of type " + std::string(pybind11::str(pybind11::type::handle_of(value).attr("__name__")));
    fail_usage(name + " takes " + what_it_takes<Field>() + ", not " + given);
  }
}

// Takes what a dictionary names, each name once; what it does not name stays as it was. The dictionary outlives it.
class Named {
 public:
  explicit Named(const pybind11::dict& options) : options_(options) {}

  template <class Field>
  void take(const char* name, Field& field) {
    known_ += std::string(known_.empty() ? "" : ", ") + name;
    if (!options_.contains(name)) return;
    field = value_of<Field>(name, options_[name]);
    taken_.insert(name);
  }
  // Throws Exception (kind usage), with the names that were asked for, where there is one that nothing took.
  void expect_no_more() const {
    for (const auto& [name, value] : options_)
      if (const std::string text = pybind11::str(name); !taken_.contains(text))
        fail_usage("an option is unknown: \"" + text + "\"; there are " + known_);
  }

 private:
  const pybind11::dict& options_;
  std::string known_;
  std::set<std::string> taken_;
};

}  // namespace tierflow::bindings

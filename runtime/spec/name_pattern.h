#pragma once
// A regular expression (ECMAScript, without back-references) for the names of modules and tensors. A hostile expression
// cannot take exponential time.
#include <regex>
#include <string>

namespace tierflow {

class NamePattern {
 public:
  // before, after: what is compiled around `text`. Throws Exception (kind usage) for more than 1000 characters and for
  // an invalid expression.
  explicit NamePattern(const std::string& text, const std::string& before = "", const std::string& after = "");

  bool fits(const std::string& name) const;      // the whole of it
  bool found_in(const std::string& name) const;  // anywhere

 private:
  std::regex expression_;
};

}  // namespace tierflow

#include "runtime/spec/name_pattern.h"

#include <fmt/format.h>

#include "runtime/base/exception.h"
#include "runtime/base/files.h"

namespace tierflow {
namespace {

constexpr std::size_t kLongest = 1000;

std::regex compiled(const std::string& text, const std::string& before, const std::string& after) {
  if (text.size() > kLongest) fail_usage(fmt::format("\"{}\" is longer than {} characters", printable(text), kLongest));
  try {
    return std::regex(before + text + after, std::regex::ECMAScript | std::regex_constants::__polynomial);
  } catch (const std::regex_error&) {
    fail_usage(fmt::format("\"{}\" is no regular expression", printable(text)));
  }
}

}  // namespace

NamePattern::NamePattern(const std::string& text, const std::string& before, const std::string& after)
    : expression_(compiled(text, before, after)) {}

bool NamePattern::fits(const std::string& name) const {
  return std::regex_match(name, expression_);
}

bool NamePattern::found_in(const std::string& name) const {
  return std::regex_search(name, expression_);
}

}  // namespace tierflow

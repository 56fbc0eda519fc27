#include "runtime/base/strict_json.h"

#include <fmt/format.h>

#include <cmath>
#include <unordered_set>
#include <vector>

#include "runtime/base/exception.h"
#include "runtime/base/files.h"

namespace tierflow {

Json parse_json(std::string_view text, const std::string& where, int max_depth) {
  // The parser takes a zero byte for the end of its input.
  if (text.find('\0') != std::string_view::npos) fail_input(where, "is not valid JSON: it has a zero byte");
  std::vector<std::unordered_set<std::string>> names;
  const auto check = [&](int depth, Json::parse_event_t event, Json& value) {
    if (depth > max_depth) fail_input(where, fmt::format("nests deeper than {} levels", max_depth));
    if (event == Json::parse_event_t::object_start) names.emplace_back();
    if (event == Json::parse_event_t::object_end) names.pop_back();
    if (event == Json::parse_event_t::key) {
      const auto& name = value.get_ref<const std::string&>();
      if (!names.back().insert(name).second)
        fail_input(where, fmt::format("has the name \"{}\" twice in one object", printable(name)));
    }
    return true;
  };
  try {
    return Json::parse(text, check);
  } catch (const Json::exception& error) {
    std::string reason = error.what();
    if (const auto bracket = reason.find("] "); bracket != std::string::npos) reason.erase(0, bracket + 2);
    const std::string_view in_first_line = "parse error at line 1, ";
    if (reason.starts_with(in_first_line) && text.find('\n') == std::string_view::npos)
      reason.replace(0, in_first_line.size(), "at ");
    fail_input(where, "is not valid JSON: " + printable(reason, 160));
  }
}

namespace {
thread_local FieldsAsked* asked = nullptr;
}

FieldsAsked::FieldsAsked() : before_(asked) {
  asked = this;
}
FieldsAsked::~FieldsAsked() {
  asked = before_;
}

void JsonFields::know(std::initializer_list<const char*> names) const {
  if (asked == nullptr) return;
  for (const char* name : names) asked->names_.emplace(&object_, name);
}

const Json* JsonFields::find(const char* name) const {
  know({name});
  const auto found = object_.find(name);
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

bool JsonFields::is_null(const char* name) const {
  const auto found = object_.find(name);
  return found != object_.end() && found->is_null();
}

void JsonFields::fail(const char* name, const std::string& detail) const {
  fail_input(where_, fmt::format("{} {}", printable(name), detail));
}

std::int64_t JsonFields::integer(const char* name, std::int64_t least, std::int64_t most) const {
  const Json* value = find(name);
  if (value == nullptr) fail(name, "is missing");
  // 4096.0 is what some tools write for 4096.
  const bool whole = value->is_number_float() && std::abs(value->get<double>()) < 0x1p53 &&
                     value->get<double>() == std::floor(value->get<double>());
  if (!value->is_number_integer() && !whole)
    fail(name, fmt::format("is {}; it must be a whole number", printable(value->dump(-1, ' ', true))));
  const bool fits = whole || !value->is_number_unsigned() || value->get<std::uint64_t>() <= INT64_MAX;
  const std::int64_t number = !fits   ? 0
                              : whole ? static_cast<std::int64_t>(value->get<double>())
                                      : value->get<std::int64_t>();
  if (!fits || number < least || number > most)
    fail(name, fmt::format("is {}; it must be between {} and {}", value->dump(), least, most));
  return number;
}

std::int64_t JsonFields::integer_or(const char* name, std::int64_t fallback, std::int64_t least,
                                    std::int64_t most) const {
  return find(name) == nullptr ? fallback : integer(name, least, most);
}

double JsonFields::number_or(const char* name, double fallback, double least, double most) const {
  const Json* value = find(name);
  if (value == nullptr) return fallback;
  if (!value->is_number()) fail(name, fmt::format("is {}; it must be a number", printable(value->dump(-1, ' ', true))));
  const double number = value->get<double>();
  if (!(number >= least && number <= most))
    fail(name, fmt::format("is {}; it must be between {} and {}", number, least, most));
  return number;
}

bool JsonFields::boolean_or(const char* name, bool fallback) const {
  const Json* value = find(name);
  if (value == nullptr) return fallback;
  if (!value->is_boolean())
    fail(name, fmt::format("is {}; it must be true or false", printable(value->dump(-1, ' ', true))));
  return value->get<bool>();
}

std::string JsonFields::text_or(const char* name, const std::string& fallback) const {
  const Json* value = find(name);
  if (value == nullptr) return fallback;
  if (!value->is_string()) fail(name, fmt::format("is {}; it must be a string", printable(value->dump(-1, ' ', true))));
  return value->get<std::string>();
}

}  // namespace tierflow

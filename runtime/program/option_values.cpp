#include "runtime/program/option_values.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>

#include "runtime/base/exception.h"
#include "runtime/base/files.h"

namespace tierflow {
namespace {

template <class T>
T parse_all(const std::string& text, const std::string& option, const char* what) {
  T value{};
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || rest != end || text.empty())
    fail_option(option, fmt::format("is \"{}\"; it must be {}", printable(text), what));
  return value;
}

}  // namespace

void fail_option(const std::string& option, const std::string& detail) {
  fail_usage(fmt::format("--{} {}", option, detail));
}

std::int64_t parse_integer(const std::string& text, const std::string& option) {
  return parse_all<std::int64_t>(text, option, "a whole number");
}

std::uint64_t parse_seed(const std::string& text, const std::string& option) {
  return parse_all<std::uint64_t>(text, option, "a whole number from 0 to 2^64-1");
}

double parse_number(const std::string& text, const std::string& option) {
  const double value = parse_all<double>(text, option, "a number");
  if (!std::isfinite(value)) fail_option(option, fmt::format("is {}; it must be finite", printable(text)));
  return value;
}

std::uint64_t parse_bytes(const std::string& text, const std::string& option) {
  double value = 0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value, std::chars_format::fixed);
  std::string unit(rest, end);
  unit.erase(0, unit.find_first_not_of(' '));
  std::transform(unit.begin(), unit.end(), unit.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  static const std::map<std::string, double> units = {
      {"", 1},         {"b", 1},      {"k", 0x1p10},   {"kib", 0x1p10}, {"m", 0x1p20}, {"mib", 0x1p20}, {"g", 0x1p30},
      {"gib", 0x1p30}, {"t", 0x1p40}, {"tib", 0x1p40}, {"kb", 1e3},     {"mb", 1e6},   {"gb", 1e9},     {"tb", 1e12}};
  const auto unit_found = units.find(unit);
  const double bytes = error == std::errc() && unit_found != units.end() ? value * unit_found->second : -1;
  if (!(bytes >= 0 && bytes < 0x1p62))
    fail_option(option, fmt::format("is \"{}\"; it must be a size such as 512MiB or 20GiB", printable(text)));
  return static_cast<std::uint64_t>(bytes);
}

std::string format_bytes(std::uint64_t bytes) {
  for (const auto& [shift, unit] : {std::pair{40, "TiB"}, {30, "GiB"}, {20, "MiB"}, {10, "KiB"}})
    if (bytes != 0 && bytes % (std::uint64_t{1} << shift) == 0) return fmt::format("{}{}", bytes >> shift, unit);
  return std::to_string(bytes);
}

}  // namespace tierflow

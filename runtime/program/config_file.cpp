#include "runtime/program/config_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <sstream>

#define TOML_ENABLE_FORMATTERS 0
#include <toml++/toml.h>

#include "runtime/base/exception.h"
#include "runtime/base/files.h"
#include "runtime/base/strict_json.h"

namespace tierflow {
namespace {

constexpr std::uint64_t largest_file = 1 << 20;

std::string number_text(double value) {
  return fmt::format("{}", value);
}

// A scalar as one would write it on the command line.
std::string word_of(const Json& value, const std::string& where, const std::string& name) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_boolean()) return value.get<bool>() ? "true" : "false";
  if (value.is_number_float()) return number_text(value.get<double>());
  if (value.is_number()) return value.dump();
  fail_input(where, fmt::format("{} must be a string, a number, true, false, or a list of these", printable(name)));
}

Json from_toml(const std::string& text, const std::string& where) {
  const auto scalar = [&](const toml::node& node, std::string_view name) -> Json {
    if (const auto* value = node.as_string()) return value->get();
    if (const auto* value = node.as_boolean()) return value->get();
    if (const auto* value = node.as_integer()) return value->get();
    if (const auto* value = node.as_floating_point()) return value->get();
    fail_input(where, fmt::format("{} must be a string, a number, true, false, or a list of these", printable(name)));
  };
  try {
    const toml::table table = toml::parse(text);
    Json object = Json::object();
    for (const auto& [key, node] : table) {
      Json& value = object[std::string(key.str())];
      if (const auto* list = node.as_array()) {
        value = Json::array();
        for (const toml::node& item : *list) value.push_back(scalar(item, key.str()));
      } else {
        value = scalar(node, key.str());
      }
    }
    return object;
  } catch (const toml::parse_error& error) {
    fail_input(where, fmt::format("line {}: {}", error.source().begin.line, printable(error.description(), 160)));
  }
}

}  // namespace

OptionValues read_config_file(const std::filesystem::path& path, const OptionTable& table) {
  const std::string where = path.string(), text = read_text(path, largest_file);
  const Json object = path.extension() == ".json" ? parse_json(text, where) : from_toml(text, where);
  if (!object.is_object()) fail_input(where, "must hold one JSON object");
  OptionValues values;
  for (const auto& [key, value] : object.items()) {
    std::string name = key;
    std::replace(name.begin(), name.end(), '_', '-');
    const OptionRow* row = table.find(name);
    if (row == nullptr || name == "config-file")
      fail_input(where, fmt::format("unknown option \"{}\" of `tierflow {}`{}", printable(key), table.command(),
                                    table.suggestion(name)));
    if (values.count(name) != 0) fail_input(where, fmt::format("names the option \"{}\" twice", printable(name)));
    if (value.is_null()) continue;
    auto& words = values[name];
    if (!value.is_array()) {
      words.push_back(word_of(value, where, key));
    } else {
      for (const Json& item : value) words.push_back(word_of(item, where, key));
    }
    if (row->commas && words.size() == 1) {
      std::istringstream parts(words[0]);
      words.clear();
      for (std::string part; std::getline(parts, part, ',');) words.push_back(part);
    }
  }
  return values;
}

}  // namespace tierflow

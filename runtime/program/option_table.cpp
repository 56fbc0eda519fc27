#include "runtime/program/option_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <string_view>
#include <utility>

#include "runtime/base/edit_distance.h"
#include "runtime/base/exception.h"
#include "runtime/base/files.h"
#include "runtime/base/utf8.h"
#include "runtime/program/option_values.h"

namespace tierflow {
namespace {

using OrderedJson = nlohmann::ordered_json;

// In transformers, TRL and PEFT, and here.
constexpr std::array<std::pair<std::string_view, std::string_view>, 18> kNamesElsewhere{{
    {"per-device-train-batch-size", "micro-batch"},
    {"gradient-accumulation-steps", "micro-batches"},
    {"learning-rate", "lr"},
    {"lr-scheduler-type", "lr-schedule"},
    {"warmup-steps", "warmup"},
    {"num-train-epochs", "epochs"},
    {"max-steps", "steps"},
    {"max-grad-norm", "clip"},
    {"max-length", "sequence-length"},
    {"max-seq-length", "sequence-length"},
    {"output-dir", "out"},
    {"save-steps", "export-every"},
    {"save-total-limit", "export-keep"},
    {"eval-steps", "eval-every"},
    {"resume-from-checkpoint", "resume"},
    {"lora-r", "lora-rank"},
    {"load-best-model-at-end", "export-best"},
    {"adam-epsilon", "eps"},
}};
constexpr std::uint64_t kFewestBytes = 1024;  // fewer are a number whose unit was forgotten
constexpr std::size_t kLongNames = 60;        // beyond it, they do not fit a line of the help

template <class Integer>
OptionRow integer_row(const std::string& name, Integer& value, std::int64_t least, std::int64_t most,
                      const std::string& help) {
  return {.name = name,
          .value_name = "N",
          .help = help,
          .set =
              [&value, name, least, most](const auto& words) {
                const std::int64_t number = parse_integer(words[0], name);
                if (number < least || number > most)
                  fail_option(name, fmt::format("is {}; it must be between {} and {}", number, least, most));
                value = static_cast<Integer>(number);
              },
          .get = [&value] { return OrderedJson(value); }};
}

}  // namespace

void OptionTable::text(const std::string& name, std::string& value, const std::string& help) {
  add({.name = name,
       .value_name = "TEXT",
       .help = help,
       .set = [&value](const auto& words) { value = words[0]; },
       .get = [&value] { return OrderedJson(value); }});
}

void OptionTable::path(const std::string& name, std::filesystem::path& value, const std::string& value_name,
                       const std::string& help) {
  add({.name = name,
       .value_name = value_name,
       .help = help,
       .path = true,
       .set =
           [&value, name](const auto& words) {
             if (words[0].empty()) fail_option(name, "is empty");
             value = words[0];
           },
       .get = [&value] { return value.empty() ? OrderedJson() : OrderedJson(value.string()); }});
}

void OptionTable::written(const std::string& name, std::filesystem::path& value, const std::string& value_name,
                          const std::string& help) {
  path(name, value, value_name, help);
  rows_.back().written = true;
}

void OptionTable::names_file(std::vector<std::string> words) {
  rows_.back().path = true;
  rows_.back().words = std::move(words);
}

void OptionTable::paths(const std::string& name, std::vector<std::filesystem::path>& value, bool commas,
                        const std::string& help) {
  add({.name = name,
       .value_name = "PATH",
       .help = help,
       .most = 1 << 20,
       .commas = commas,
       .path = true,
       .set =
           [&value, name](const auto& words) {
             value.assign(words.begin(), words.end());
             for (const auto& path : value)
               if (path.empty()) fail_option(name, "has an empty path");
           },
       .get =
           [&value] {
             auto list = OrderedJson::array();
             for (const auto& path : value) list.push_back(path.string());
             return list;
           }});
}

void OptionTable::bytes(const std::string& name, std::uint64_t& value, const std::string& help) {
  add({.name = name,
       .value_name = "SIZE",
       .help = help,
       .set =
           [&value, name](const auto& words) {
             const std::uint64_t bytes = words[0] == "auto" ? 0 : parse_bytes(words[0], name);
             if (bytes == 0 && words[0] != "auto")
               fail_option(name, fmt::format("is {}; give a size such as 512MiB, or auto", printable(words[0])));
             if (bytes != 0 && bytes < kFewestBytes)
               fail_option(name, fmt::format("is {}, which is {} bytes; give a unit, such as {}GiB",
                                             printable(words[0]), bytes, bytes));
             value = bytes;
           },
       .get = [&value] { return OrderedJson(value == 0 ? "auto" : format_bytes(value)); }});
}

void OptionTable::choice(const std::string& name, std::string& value, std::vector<std::string> choices,
                         const std::string& help) {
  const std::string all = fmt::format("{}", fmt::join(choices, ", "));
  const std::string names = fmt::format("{}", fmt::join(choices, "|"));
  const bool long_names = names.size() > kLongNames;
  add({.name = name,
       .value_name = long_names ? "NAME" : names,
       .help = long_names ? fmt::format("{}: {}", help, all) : help,
       .set =
           [&value, name, choices, all](const auto& words) {
             if (std::find(choices.begin(), choices.end(), words[0]) == choices.end())
               fail_option(name, fmt::format("is \"{}\"; it must be one of {}", printable(words[0]), all));
             value = words[0];
           },
       .get = [&value] { return OrderedJson(value); }});
}

void OptionTable::integer(const std::string& name, std::int64_t& value, std::int64_t least, const std::string& help,
                          std::int64_t most) {
  add(integer_row(name, value, least, most, help));
}

void OptionTable::integer(const std::string& name, int& value, int least, const std::string& help) {
  add(integer_row(name, value, least, 4096, help));
}

void OptionTable::seed(const std::string& name, std::uint64_t& value, const std::string& help) {
  add({.name = name,
       .value_name = "N",
       .help = help,
       .set = [&value, name](const auto& words) { value = parse_seed(words[0], name); },
       .get = [&value] { return OrderedJson(value); }});
}

void OptionTable::number(const std::string& name, double& value, double least, double most, const std::string& help) {
  add({.name = name,
       .value_name = "X",
       .help = help,
       .set =
           [&value, name, least, most](const auto& words) {
             const double number = parse_number(words[0], name);
             if (!(number >= least && number < most))
               fail_option(name, fmt::format("is {}; it must be at least {} and below {}", number, least, most));
             value = number;
           },
       .get = [&value] { return OrderedJson(value); }});
}

void OptionTable::flag(const std::string& name, bool& value, const std::string& help) {
  add({.name = name,
       .help = help,
       .flag = true,
       .set =
           [&value, name](const auto& words) {
             if (words[0] != "true" && words[0] != "false")
               fail_option(name, fmt::format("is \"{}\"; it must be true or false", printable(words[0])));
             value = words[0] == "true";
           },
       .get = [&value] { return OrderedJson(value); }});
}

void OptionTable::add(OptionRow row) {
  row.group = group_;
  rows_.push_back(std::move(row));
}

const OptionRow* OptionTable::find(const std::string& name) const {
  const auto found = std::find_if(rows_.begin(), rows_.end(), [&](const OptionRow& row) { return row.name == name; });
  return found == rows_.end() ? nullptr : &*found;
}

std::string OptionTable::suggestion(const std::string& name) const {
  if (name.size() > 64) return {};
  std::string dashed = name;
  std::ranges::replace(dashed, '_', '-');
  for (const auto& [theirs, ours] : kNamesElsewhere)
    if (dashed == theirs && find(std::string(ours)) != nullptr) return fmt::format("; here it is --{}", ours);
  const OptionRow* nearest = nullptr;
  std::size_t least = std::max<std::size_t>(2, name.size() / 3) + 1;
  for (const OptionRow& row : rows_) {
    const bool extends = name.size() > 2 && row.name.find(name) == 0;
    const std::size_t d = extends ? 1 : edit_distance(name, row.name);
    if (d < least) {
      least = d;
      nearest = &row;
    }
  }
  return nearest == nullptr ? std::string() : fmt::format("; did you mean --{}?", nearest->name);
}

void OptionTable::apply(const OptionValues& values, const std::string& where) const {
  try {
    for (const auto& [name, words] : values) {
      const OptionRow* row = find(name);
      const auto count = static_cast<int>(words.size());
      if (row == nullptr)
        fail(io::ErrorKind::usage, "", fmt::format("unknown option --{}{}", printable(name), suggestion(name)));
      if (count < row->least || count > row->most)
        fail_option(name, row->least == row->most
                              ? fmt::format("takes {} value{}, not {}", row->most, row->most == 1 ? "" : "s", count)
                              : "needs a value");
      for (const std::string& word : words)
        if (const std::size_t bad = find_invalid_utf8(word); bad != std::string::npos)
          fail_option(name, fmt::format("is \"{}\", which is not UTF-8 from byte {} on{}", printable(word), bad,
                                        row->path ? ": rename the file, or name it through a link" : ""));
      row->set(words);
    }
  } catch (const Exception& error) {
    if (where.empty()) throw;
    fail_input(where, error.error().detail);
  }
}

namespace {

namespace fs = std::filesystem;

std::vector<fs::path> paths_in(const OptionRow& row) {
  if (!row.path) return {};
  const OrderedJson value = row.get();
  std::vector<fs::path> paths;
  for (const OrderedJson& path : value.is_array() ? value : OrderedJson::array({value}))
    if (path.is_string() && std::ranges::find(row.words, path.get<std::string>()) == row.words.end())
      paths.emplace_back(path.get<std::string>());
  return paths;
}

bool is_same_file(const fs::path& a, const fs::path& b) {
  std::error_code error;
  if (fs::equivalent(a, b, error)) return true;
  const auto whole = [&](const fs::path& path) { return fs::weakly_canonical(fs::absolute(path, error), error); };
  const fs::path whole_a = whole(a);
  return !whole_a.empty() && whole_a == whole(b);
}

bool lies_in(const fs::path& file, const fs::path& folder) {
  std::error_code error;
  return fs::exists(file, error) && is_same_file(fs::absolute(file, error).parent_path(), folder);
}

// Whether a folder of a model or adapters has files of that name, and a run reads them.
bool is_name_of_model(const fs::path& file) {
  constexpr std::array<std::string_view, 9> kNames = {"config.json",    "generation_config.json", "adapter_config.json",
                                                      "tokenizer.json", "tokenizer_config.json",  "tokenizer.model",
                                                      "vocab.json",     "chat_template.jinja",    "chat_template.json"};
  const std::string name = file.filename().string();
  return name.ends_with(".safetensors") || name.ends_with(".index.json") ||
         std::ranges::find(kNames, name) != kNames.end();
}

}  // namespace

void OptionTable::check_written(const std::string& config_file) const {
  std::vector<std::pair<std::string, fs::path>> named;
  for (const OptionRow& row : rows_)
    for (fs::path& path : paths_in(row)) named.emplace_back(row.name, std::move(path));
  if (!config_file.empty()) named.emplace_back("config-file", config_file);
  for (const auto& [name, file] : named) {
    std::error_code ignored;
    const bool no_file = fs::exists(file, ignored) && !fs::is_regular_file(file, ignored);  // /dev/null
    if (name == "config-file" || !find(name)->written || no_file) continue;
    const auto refuse = [&](const std::string& why) {
      fail_option(name,
                  fmt::format("is {}, {}: it would be overwritten; name another file", printable(file.string()), why));
    };
    for (const auto& [other, path] : named) {
      if (other == name) continue;
      if (is_same_file(file, path)) refuse(fmt::format("which --{} names too", other));
      if (lies_in(file, path) &&
          (other == "data" || ((other == "model" || other == "adapter") && is_name_of_model(file))))
        refuse(fmt::format("a file of --{}", other));
    }
  }
}

nlohmann::ordered_json OptionTable::effective() const {
  OrderedJson all = OrderedJson::object();
  for (const OptionRow& row : rows_) {
    const OrderedJson value = row.get ? row.get() : OrderedJson();
    if (row.shown && !value.is_null() && !(value.is_array() && value.empty())) all[row.name] = value;
  }
  return all;
}

}  // namespace tierflow

#include "runtime/program/command_line.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>

#include "runtime/base/exception.h"
#include "runtime/base/files.h"
#include "runtime/base/terminal.h"
#include "runtime/program/config_file.h"
#include "runtime/program/option_values.h"

namespace tierflow {
namespace {

using OrderedJson = nlohmann::ordered_json;

// Ahead of a word that begins with "[": without it CLI11 takes "[a,b]" for two words.
constexpr char kAsItIs = '\x01';

std::string default_of(const OptionRow& row) {
  const OrderedJson value = row.get();
  if (row.flag || value.is_null() || (value.is_array() && value.empty())) return {};
  if (!value.is_array()) return value.is_string() ? value.get<std::string>() : value.dump();
  std::string joined;
  for (const auto& item : value) joined += (joined.empty() ? "" : ",") + item.dump();
  return joined;
}

}  // namespace

// CLI11 takes the words apart; the table gives them meaning.
struct CommandLine::Impl {
  explicit Impl(const OptionTable& t) : table(t), app("", "tierflow " + t.command()) {}

  const OptionTable& table;
  CLI::App app;
  OptionValues values;
  std::string config_file;

  [[noreturn]] void refuse(const std::string& word) const {
    if (word.substr(0, 2) != "--")
      fail_usage(fmt::format("unexpected word \"{}\" after `tierflow {}`", printable(word), table.command()));
    const std::string name = word.substr(2, word.find('=') - 2);
    fail_usage(fmt::format("unknown option --{} of `tierflow {}`{}", printable(name), table.command(),
                           table.suggestion(name)));
  }
};

CommandLine::CommandLine(const OptionTable& table) : impl_(std::make_unique<Impl>(table)) {
  CLI::App& app = impl_->app;
  app.allow_extras();
  app.set_help_flag();
  OptionValues& values = impl_->values;
  for (const OptionRow& row : table.rows()) {
    if (row.flag) {
      app.add_flag_callback("--" + row.name, [&values, &row] { values[row.name] = {"true"}; });
      continue;
    }
    auto* option = app.add_option_function<std::vector<std::string>>("--" + row.name,
                                                                     [&values, &row](std::vector<std::string> words) {
                                                                       for (std::string& word : words)
                                                                         if (!word.empty() && word.front() == kAsItIs)
                                                                           word.erase(0, 1);
                                                                       values[row.name] = std::move(words);
                                                                     });
    option->expected(1, row.most > 2 ? CLI::detail::expected_max_vector_size : row.most);
    if (row.commas) option->delimiter(',');
  }
  app.add_option("--config-file", impl_->config_file);
}

CommandLine::~CommandLine() = default;

std::string CommandLine::help(std::size_t columns) const {
  constexpr std::size_t indent = 26;
  const auto line = [&](const std::string& words, std::string text) {
    const std::string start = "  " + words;
    const bool beside = start.size() + 2 <= indent;
    return start + (beside ? std::string(indent - start.size(), ' ') : "\n" + std::string(indent, ' ')) +
           wrapped(text, columns, indent) + "\n";
  };
  std::vector<std::pair<std::string, std::string>> groups;  // in the order in which they begin
  for (const OptionRow& row : impl_->table.rows()) {
    auto group = std::find_if(groups.begin(), groups.end(), [&](const auto& g) { return g.first == row.group; });
    if (group == groups.end()) group = groups.insert(groups.end(), {row.group, ""});
    const std::string value = default_of(row);
    group->second += line("--" + row.name + (row.flag ? "" : " " + row.value_name) + (row.most > 2 ? " ..." : ""),
                          row.help + (value.empty() ? "" : " [" + value + "]"));
  }
  std::string text = "Usage: tierflow " + impl_->table.command() + " [OPTIONS]\n";
  for (const auto& [heading, rows] : groups) text += "\n" + heading + ":\n" + rows;
  return text + "\nOther:\n" +
         line("--config-file FILE", "TOML or JSON file of these options, without the dashes; the command line wins") +
         line("-h, --help", "print this help and exit");
}

void CommandLine::apply(std::vector<std::string> words) {
  for (std::string& word : words) {
    if (word.starts_with("[")) word.insert(0, 1, kAsItIs);
    if (const auto at = word.find("=["); word.starts_with("--") && at != std::string::npos)
      word.insert(at + 1, 1, kAsItIs);
  }
  std::reverse(words.begin(), words.end());  // as CLI11 wants them
  try {
    impl_->app.parse(words);
  } catch (const CLI::ArgumentMismatch& error) {  // "--steps: At Most 1 required but received 2"
    const std::string why = error.what(), name = why.substr(0, why.find(':'));
    fail_usage(printable(name) + (why.find("received") != std::string::npos
                                      ? " is given more than once, or with too many values"
                                      : " needs a value"));
  } catch (const CLI::ParseError& error) {
    fail_usage(printable(error.what(), 300));
  }
  for (const std::string& extra : impl_->app.remaining())
    impl_->refuse(extra.starts_with(kAsItIs) ? extra.substr(1) : extra);
  if (!impl_->config_file.empty())
    impl_->table.apply(read_config_file(impl_->config_file, impl_->table), impl_->config_file);
  impl_->table.apply(impl_->values, "");
  impl_->table.check_written(impl_->config_file);
}

}  // namespace tierflow

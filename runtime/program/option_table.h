#pragma once
// The options of one command: their names, how text becomes their values, and how values become text.
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace tierflow {

using OptionValues = std::map<std::string, std::vector<std::string>>;  // by name, without dashes

struct OptionRow {
  std::string name, value_name, help;
  std::string group;  // heading of the help; set by OptionTable::add
  bool flag = false;
  int least = 1, most = 1;  // values
  bool commas = false;      // values may be joined by commas
  bool shown = true;        // part of the effective configuration
  bool path = false;        // of files or folders, but for the values `words`
  std::vector<std::string> words = {};
  bool written = false;  // a path of a file that the command writes
  std::function<void(const std::vector<std::string>&)> set;
  std::function<nlohmann::ordered_json()> get;
};

class OptionTable {
 public:
  explicit OptionTable(std::string command) : command_(std::move(command)) {}

  void text(const std::string& name, std::string& value, const std::string& help);
  void path(const std::string& name, std::filesystem::path& value, const std::string& value_name,
            const std::string& help);
  // Of a file that the command writes.
  void written(const std::string& name, std::filesystem::path& value, const std::string& value_name,
               const std::string& help);
  void paths(const std::string& name, std::vector<std::filesystem::path>& value, bool commas, const std::string& help);
  // A size of at least one byte, or "auto", which is 0.
  void bytes(const std::string& name, std::uint64_t& value, const std::string& help);
  void choice(const std::string& name, std::string& value, std::vector<std::string> choices, const std::string& help);
  // Within [least, most].
  void integer(const std::string& name, std::int64_t& value, std::int64_t least, const std::string& help,
               std::int64_t most = std::int64_t{1} << 40);
  void integer(const std::string& name, int& value, int least, const std::string& help);
  void seed(const std::string& name, std::uint64_t& value, const std::string& help);
  // Within [least, most).
  void number(const std::string& name, double& value, double least, double most, const std::string& help);
  void flag(const std::string& name, bool& value, const std::string& help);
  // Rows added from now on are listed under that heading.
  void group(const std::string& heading) { group_ = heading; }
  void add(OptionRow row);
  // What the row added last names is a file, unless it is one of `words`.
  void names_file(std::vector<std::string> words);
  // The row added last is only for this run: the printed configuration leaves it out.
  void for_one_run() { rows_.back().shown = false; }

  const std::string& command() const { return command_; }
  const std::vector<OptionRow>& rows() const { return rows_; }
  // The row of that name, or null.
  const OptionRow* find(const std::string& name) const;
  // "; did you mean --x?", or nothing if no name is near.
  std::string suggestion(const std::string& name) const;
  // Sets what `values` names; `where` (a file, or empty) goes into errors.
  void apply(const OptionValues& values, const std::string& where) const;
  // Throws Exception (kind usage) if a file that the command writes is named by another option too, or is one that it
  // reads in a folder of data, a model or adapters. config_file: that of --config-file, or empty.
  void check_written(const std::string& config_file) const;
  nlohmann::ordered_json effective() const;

 private:
  std::string command_, group_ = "Options";
  std::vector<OptionRow> rows_;
};

}  // namespace tierflow

#pragma once
// The words after a command's name, checked against its table of options.
#include <memory>
#include <string>
#include <vector>

#include "runtime/program/option_table.h"

namespace tierflow {

class CommandLine {
 public:
  explicit CommandLine(const OptionTable& table);  // the table must outlive it
  ~CommandLine();

  // The options by group, in lines of at most that many columns, with their defaults in brackets.
  std::string help(std::size_t columns) const;
  // Sets the table's options from the configuration file that --config-file names, if any, then from the words. Throws
  // Exception (kind usage; input for the file) on anything unknown or malformed.
  void apply(std::vector<std::string> words);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tierflow

#pragma once
// Options from a file instead of the command line.
#include <filesystem>

#include "runtime/program/option_table.h"

namespace tierflow {

// TOML, or JSON where the name ends with .json. Underscores in names count as dashes. Throws Exception (kind input)
// naming the file and the option, where a name is no option of the table or a value is of no type that options have.
OptionValues read_config_file(const std::filesystem::path& path, const OptionTable& table);

}  // namespace tierflow

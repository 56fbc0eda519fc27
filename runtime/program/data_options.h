#pragma once
// The options that choose the data, and how they become sequences.
#include "runtime/program/option_table.h"
#include "runtime/program/options.h"

namespace tierflow {

// Headings of the help.
inline constexpr const char* kData = "Model and data";
inline constexpr const char* kTraining = "Training";
inline constexpr const char* kResult = "Result and log";

inline constexpr std::int64_t kMostTokens = std::int64_t{1} << 31;  // in a step

// --as.
void add_family(OptionTable& table, std::string& read_as);
// Without --as: sets the family that the adapters in this folder were trained with, if tierflow_run.json there says so.
void keep_family(std::string& read_as, const std::filesystem::path& adapter);
void add_data_rows(OptionTable& table, DataChoice& options);
// Throws Exception (kind usage) for options that contradict each other or are missing. command: its name, for the
// error.
void check_data(const DataChoice& options, const std::string& command);
// command: "prepare", "preview".
OptionTable data_table(const std::string& command, DataCommandOptions& options);

}  // namespace tierflow

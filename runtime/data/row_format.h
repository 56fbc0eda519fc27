#pragma once
// Which fields the rows of a .jsonl file have.
#include <filesystem>
#include <string>

#include "runtime/data/data.h"
#include "runtime/data/data_source.h"

namespace tierflow {

// The format of the first row, or, if bad rows are skipped, of the first row of a known format: text, messages,
// prompt-completion, sharegpt, alpaca, tokens, preference. A row that has the text's field is text, whatever else it
// has, unless pairs alone are wanted.
// It is "text" too if no row tells the format.
std::string row_format(const std::filesystem::path& path, const DataOptions& options);

// The name of the format for pairs of answers.
inline constexpr const char* kPreferenceFormat = "preference";

// The formats and their fields, for error messages.
inline constexpr const char* kRowFormats =
    "text, messages, prompt and completion, conversations (ShareGPT), instruction and output (Alpaca), chosen and "
    "rejected, "
    "input_ids";

}  // namespace tierflow

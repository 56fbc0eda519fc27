#pragma once
// Which fields the rows of a .jsonl file have.
#include <filesystem>
#include <string>

#include "runtime/data/data.h"
#include "runtime/data/data_source.h"

namespace tierflow {

// That of the first row, or of the first one that is of a known format where bad rows are passed over: text,
// messages, prompt-completion, sharegpt, alpaca, tokens, preference. A row that has the text's field is text, whatever
// else it has, unless pairs alone are wanted.
// "text" too where no row tells.
std::string row_format(const std::filesystem::path& path, const DataOptions& options);

// That of pairs of answers.
inline constexpr const char* kPreferenceFormat = "preference";

// The formats and their fields, for messages.
inline constexpr const char* kRowFormats =
    "text, messages, prompt and completion, conversations (ShareGPT), instruction and output (Alpaca), chosen and "
    "rejected, "
    "input_ids";

}  // namespace tierflow

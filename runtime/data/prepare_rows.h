#pragma once
// Turns rows of conversations, prompts and completions, texts or token ids into a file of tokens. The model's own
// tokenizer does this in Python, once: the file is kept in the cache under a name that is a hash of what it was made
// from.
#include <string>
#include <vector>

#include "runtime/data/data.h"
#include "runtime/data/data_source.h"
#include "runtime/data/row_file.h"

namespace tierflow {

// The rows of the sources, which are .jsonl files; formats: of each. From the cache, or prepared into it. Rows
// without a token to train on are left out, and counted in the notes:
//     {"files": [{"path", "format"}], "train_on", "masks": [how trained tokens were found: "generation", "contents",
//      "prefixes"], "untrained": rows left out, "skipped": bad rows passed over, "first_skipped": why, "merged":
//      prompts whose last tokens merge with the completion's first}
// Throws Exception (input) naming file, line and what is wrong.
RowFile prepare_rows(const DataOptions& options, const std::vector<Source>& sources,
                     const std::vector<std::string>& formats);

}  // namespace tierflow

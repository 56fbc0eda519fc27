#pragma once
// The Python scripts that prepare data, built in, so that the program finds them wherever it is installed: the texts of
// tokenize.py, and of row_files.py, chat_template.py, assistant_turns.py, named_tokens.py, prompts.py and
// prepare_rows.py, in bindings/tierflow, each behind that of script_process.py.

namespace tierflow {

extern const char* const tokenizer_script;
extern const char* const rows_script;

}  // namespace tierflow

#pragma once
namespace tierflow {

// The texts of bindings/tierflow: tokenize.py; row_files.py and prepare_rows.py. Built in, so that the program finds them
// wherever it is installed.
extern const char* const tokenizer_script;
extern const char* const rows_script;

}  // namespace tierflow

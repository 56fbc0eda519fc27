#pragma once
namespace tierflow {

// The texts of bindings/tierflow/tokenize.py and prepare_rows.py, built in so that the program finds them wherever it
// is installed.
extern const char* const tokenizer_script;
extern const char* const rows_script;

}  // namespace tierflow

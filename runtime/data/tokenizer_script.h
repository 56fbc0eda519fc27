#pragma once
namespace tierflow {

// The text of bindings/tierflow/tokenize.py, built in so that the program finds it wherever it is installed.
extern const char* const tokenizer_script;

}  // namespace tierflow

#pragma once
// Turns tokens into text that a person can read.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "runtime/data/data.h"

namespace tierflow {

class PythonProcess;

class TokenTexts {
 public:
  // Starts the Python of the options with their tokenizer, if there is one.
  explicit TokenTexts(const DataOptions& options);
  ~TokenTexts();
  // The text of each list, special tokens by their names; without a tokenizer, ids below 256 are bytes, and a list with
  // others is its numbers.
  std::vector<std::string> decode(const std::vector<std::vector<std::int64_t>>& lists);

 private:
  std::unique_ptr<PythonProcess> process_;  // null: without a tokenizer
};

}  // namespace tierflow

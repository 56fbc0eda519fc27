#pragma once
// Turns prompts into tokens, and tokens into text, with the model's own tokenizer and chat template, in Python.
#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "runtime/data/data.h"

namespace tierflow {

class PythonProcess;

class PromptTokenizer {
 public:
  // Starts the options' Python with their tokenizer and chat_template; without a tokenizer, tokens are bytes.
  explicit PromptTokenizer(const DataOptions& options);
  ~PromptTokenizer();

  // Of each prompt {"text": ...} or {"messages": [...]}, the latter up to where the assistant begins to speak. Text has
  // the special tokens that the tokenizer adds. Throws Exception (kind input) for what is neither, and for messages
  // without a tokenizer or a chat template.
  std::vector<std::vector<std::int64_t>> encode(const nlohmann::ordered_json& prompts);
  // The ids of tokens with these texts. Throws Exception (kind input) for a token that the tokenizer does not have.
  std::vector<std::int64_t> ids_of(const std::vector<std::string>& tokens);
  // The text of tokens, special ones left out; U+FFFD stands for bytes that are no character yet.
  std::string decode(const std::vector<std::int64_t>& tokens);

  // From now on a signal that stops the command does not end these calls.
  void ignore_stops();

 private:
  nlohmann::ordered_json ask(const nlohmann::ordered_json& request);
  std::unique_ptr<PythonProcess> process_;  // null: without a tokenizer
};

}  // namespace tierflow

#pragma once
// Prompts as people write them, in the form that PromptTokenizer takes.
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace tierflow {

struct PromptForm {
  bool chat = false;        // plain text is a user's message
  std::string system = {};  // the message before it, and before messages that begin without one; empty: none
};

nlohmann::ordered_json as_prompt(const PromptForm& form, std::string text);
// Of a text file a prompt a line, of a .jsonl file rows of "messages", or of "prompt" or "text". Throws Exception (kind
// input) that names file and line.
nlohmann::ordered_json read_prompts(const std::filesystem::path& path, const PromptForm& form);

}  // namespace tierflow

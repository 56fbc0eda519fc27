#include "runtime/program/prompts.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "runtime/base/exception.h"
#include "runtime/base/files.h"
#include "runtime/base/strict_json.h"
#include "runtime/base/utf8.h"

namespace tierflow {

using OrderedJson = nlohmann::ordered_json;

namespace {

constexpr std::uint64_t kLargestPrompts = std::uint64_t{1} << 30;
constexpr std::string_view kUtf8Mark = "\xef\xbb\xbf";

OrderedJson system_message(const PromptForm& form) {
  return {{"role", "system"}, {"content", form.system}};
}

// A row of messages, which may begin with such a message of its own.
OrderedJson with_system(const PromptForm& form, OrderedJson row) {
  OrderedJson& messages = row["messages"];
  if (form.system.empty() || !messages.is_array() || messages.empty()) return row;
  const OrderedJson role = messages.front().is_object() ? messages.front().value("role", OrderedJson()) : OrderedJson();
  if (role != "system" && role != "developer") messages.insert(messages.begin(), system_message(form));
  return row;
}

OrderedJson row_prompt(const PromptForm& form, const std::string& line, const std::string& where) {
  parse_json(line, where);                     // refuses what is none
  OrderedJson row = OrderedJson::parse(line);  // templates see the keys in their order
  if (row.is_object() && row.contains("messages")) {
    const OrderedJson& messages = row["messages"];
    if (messages.is_array() && !messages.empty() && messages.back().is_object() &&
        messages.back().value("role", OrderedJson()) == "assistant")
      fail_input(where, "ends with a message of the assistant: a prompt ends with the message that it is to answer");
    return with_system(form, std::move(row));
  }
  for (const char* field : {"prompt", "text"})
    if (row.is_object() && row.contains(field) && row[field].is_string())
      return as_prompt(form, row[field].get<std::string>());
  fail_input(where, "is no object with \"messages\", or with \"prompt\" or \"text\" as a string");
}

}  // namespace

OrderedJson as_prompt(const PromptForm& form, std::string text) {
  if (!form.chat) return {{"text", std::move(text)}};
  auto messages = OrderedJson::array();
  if (!form.system.empty()) messages.push_back(system_message(form));
  messages.push_back({{"role", "user"}, {"content", std::move(text)}});
  return {{"messages", std::move(messages)}};
}

OrderedJson read_prompts(const std::filesystem::path& path, const PromptForm& form) {
  auto prompts = OrderedJson::array();
  const std::string file = path.string();
  if (path.extension() == ".json")
    fail_input(file,
               "is JSON: prompts are lines of text, or objects in lines of a file that ends in .jsonl "
               "(`jq -c '.[]' a.json > a.jsonl`)");
  std::string text = read_text(path, kLargestPrompts);
  if (text.starts_with(kUtf8Mark)) text.erase(0, kUtf8Mark.size());
  const bool rows = path.extension() == ".jsonl";
  std::size_t number = 0;
  for (std::size_t begin = 0; begin < text.size(); ++number) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    std::string line = text.substr(begin, end - begin);
    begin = end + 1;
    const std::string where = fmt::format("{}:{}", file, number + 1);
    if (!line.empty() && line.back() == '\r') line.pop_back();
    if (line.empty()) continue;
    if (find_invalid_utf8(line) != std::string::npos) fail_input(where, "is not UTF-8");
    prompts.push_back(rows ? row_prompt(form, line, where) : as_prompt(form, std::move(line)));
  }
  if (prompts.empty()) fail_input(file, "has no prompt");
  return prompts;
}

}  // namespace tierflow

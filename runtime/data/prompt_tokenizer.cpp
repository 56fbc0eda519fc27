#include "runtime/data/prompt_tokenizer.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "runtime/base/exception.h"
#include "runtime/base/utf8.h"
#include "runtime/data/row_frames.h"
#include "runtime/data/tokenizer_process.h"

namespace tierflow {
namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr std::uint64_t kLargestTemplate = 16 << 20;

}  // namespace

PromptTokenizer::PromptTokenizer(const DataOptions& options) {
  expect_tokenizer(options);
  if (options.tokenizer.empty()) return;
  process_ = std::make_unique<PythonProcess>(rows_job(options, "prompts"));
  OrderedJson job{{"folder", tokenizer_folder(options).string()}, {"template", nullptr}};
  if (!options.chat_template.empty()) job["template"] = read_text(options.chat_template, kLargestTemplate);
  send_json(*process_, job);
}

PromptTokenizer::~PromptTokenizer() = default;

void PromptTokenizer::ignore_stops() {
  if (process_ != nullptr) process_->ignore_stops();
}

OrderedJson PromptTokenizer::ask(const OrderedJson& request) {
  send_json(*process_, request);
  return receive_frame(*process_).json();
}

std::vector<std::vector<std::int64_t>> PromptTokenizer::encode(const OrderedJson& prompts) {
  if (process_ != nullptr) return ask({{"prompts", prompts}}).get<std::vector<std::vector<std::int64_t>>>();
  std::vector<std::vector<std::int64_t>> lists;
  for (const OrderedJson& prompt : prompts) {
    if (!prompt.contains("text"))
      fail_input("",
                 "a conversation needs the model's tokenizer: there is no tokenizer.json; name one with --tokenizer");
    const auto text = prompt["text"].get<std::string>();
    auto& ids = lists.emplace_back();
    for (const char byte : text) ids.push_back(static_cast<unsigned char>(byte));
  }
  return lists;
}

std::vector<std::int64_t> PromptTokenizer::ids_of(const std::vector<std::string>& tokens) {
  if (process_ != nullptr) return ask({{"tokens", tokens}}).get<std::vector<std::int64_t>>();
  std::vector<std::int64_t> ids;
  for (const std::string& token : tokens) {
    if (token.size() != 1)
      fail_input("", fmt::format("without a tokenizer a token is one byte, not \"{}\"", printable(token)));
    ids.push_back(static_cast<unsigned char>(token.front()));
  }
  return ids;
}

std::string PromptTokenizer::decode(const std::vector<std::int64_t>& tokens) {
  if (process_ != nullptr) return ask({{"texts", {tokens}}})[0].get<std::string>();
  std::string bytes;
  for (const std::int64_t token : tokens) bytes += token < 256 ? static_cast<char>(token) : '?';
  return bytes;
}

}  // namespace tierflow

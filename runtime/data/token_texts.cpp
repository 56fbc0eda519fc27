#include "runtime/data/token_texts.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "runtime/data/row_frames.h"

namespace tierflow {

TokenTexts::TokenTexts(const DataOptions& options) {
  if (options.tokenizer.empty()) return;
  process_ = std::make_unique<PythonProcess>(rows_job(options, "decode"));
  send_json(*process_, {{"folder", tokenizer_folder(options).string()}});
}

TokenTexts::~TokenTexts() = default;

std::vector<std::string> TokenTexts::decode(const std::vector<std::vector<std::int64_t>>& lists) {
  if (process_ != nullptr) {
    send_json(*process_, lists);
    return receive_frame(*process_).json().get<std::vector<std::string>>();
  }
  std::vector<std::string> texts;
  for (const auto& ids : lists) {
    const bool bytes = std::all_of(ids.begin(), ids.end(), [](std::int64_t id) { return id < 256; });
    texts.push_back(bytes ? std::string(ids.begin(), ids.end()) : fmt::format("{} ", fmt::join(ids, " ")));
  }
  return texts;
}

}  // namespace tierflow

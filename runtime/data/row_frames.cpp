#include "runtime/data/row_frames.h"

#include <array>
#include <cstring>
#include <nlohmann/json.hpp>

#include "runtime/base/exception.h"
#include "runtime/base/files.h"
#include "runtime/data/scripts.h"

namespace tierflow {

std::filesystem::path tokenizer_folder(const DataOptions& options) {
  return options.tokenizer.empty() ? std::filesystem::path()
                                   : std::filesystem::absolute(options.tokenizer).parent_path();
}

PythonProcess::Job rows_job(const DataOptions& options, const char* mode) {
  return {.script = rows_script,
          .arguments = {mode},
          .python = options.python,
          .path = tokenizer_folder(options).string(),
          .package = "transformers",
          .patience = options.tokenizer_seconds};
}

void send_json(PythonProcess& process, const nlohmann::ordered_json& value) {
  const std::string text = value.dump();
  const auto length = static_cast<std::uint32_t>(text.size());
  process.send(std::as_bytes(std::span(&length, 1)));
  process.send(std::as_bytes(std::span(text.data(), text.size())));
}

nlohmann::ordered_json Frame::json() const {
  const auto* text = reinterpret_cast<const char*>(payload.data());
  return nlohmann::ordered_json::parse(text, text + payload.size());
}

Frame receive_frame(PythonProcess& process) {
  process.heed_stop();
  std::array<std::byte, 5> head{};
  process.receive(head);
  std::uint32_t size = 0;
  std::memcpy(&size, &head[1], sizeof size);
  Frame frame{.kind = static_cast<char>(head[0]), .payload = std::vector<std::byte>(size)};
  process.receive(frame.payload);
  if (frame.kind == 'F') {
    const auto failure = frame.json();
    fail_input(failure["where"], printable(failure["why"].get<std::string>(), 700));
  }
  return frame;
}

}  // namespace tierflow

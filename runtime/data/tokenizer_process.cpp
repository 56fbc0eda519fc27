#include "runtime/data/tokenizer_process.h"

#include <fmt/format.h>

#include <array>

#include "runtime/base/exception.h"
#include "runtime/data/scripts.h"

namespace tierflow {
namespace {

struct Greeting {
  std::array<char, 4> magic;
  std::uint32_t vocab_size;
  std::int32_t end_of_text;
};

template <class T>
std::span<std::byte> bytes_of(T& value) {
  return std::as_writable_bytes(std::span(&value, 1));
}

void append(std::vector<std::byte>& request, std::uint32_t word) {
  const auto bytes = std::as_bytes(std::span(&word, 1));
  request.insert(request.end(), bytes.begin(), bytes.end());
}

PythonProcess::Job job_of(const DataOptions& options) {
  const std::string path = options.tokenizer.string();
  open_regular(options.tokenizer);
  return {.script = tokenizer_script,
          .arguments = {path},
          .python = options.python,
          .path = path,
          .package = "tokenizers",
          .patience = options.tokenizer_seconds};
}

}  // namespace

void expect_tokenizer(const DataOptions& options) {
  if (!options.tokenizer.empty() || options.other_tokenizer.empty()) return;
  const std::string folder = options.other_tokenizer.parent_path().string();
  fail_input(folder,
             fmt::format("has {0}, but no tokenizer.json, which is what is read here. python3 -c \"from transformers "
                         "import AutoTokenizer as T; T.from_pretrained('{1}').save_pretrained('{1}')\" writes one; "
                         "--tokenizer bytes takes each byte for a token",
                         printable(options.other_tokenizer.filename().string()), printable(folder, 500)));
}

TokenizerProcess::TokenizerProcess(const DataOptions& options) : process_(job_of(options)) {
  Greeting greeting{};
  process_.receive(bytes_of(greeting));
  if (greeting.magic != std::array{'T', 'F', 'T', 'K'})
    fail(io::ErrorKind::environment, process_.python(), "is not a Python 3 interpreter");
  vocab_size_ = greeting.vocab_size;
  end_of_text_ = greeting.end_of_text;
}

std::vector<std::uint32_t> TokenizerProcess::encode(std::span<const TextPiece> pieces) {
  std::vector<std::byte> request;
  append(request, static_cast<std::uint32_t>(pieces.size()));
  for (const TextPiece& piece : pieces) {
    append(request, static_cast<std::uint32_t>(piece.text.size()) | (piece.ends_document ? 0x80000000u : 0u));
    const auto bytes = std::as_bytes(std::span(piece.text.data(), piece.text.size()));
    request.insert(request.end(), bytes.begin(), bytes.end());
  }
  process_.send(request);
  std::uint32_t count = 0;
  process_.receive(bytes_of(count));
  std::vector<std::uint32_t> ids(count);
  process_.receive(std::as_writable_bytes(std::span(ids)));
  return ids;
}

}  // namespace tierflow

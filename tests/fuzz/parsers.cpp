// What reads the files of other people, on any bytes. An Exception or an io::Error of one line is the right answer to
// nonsense; anything else that leaves a parser is a defect. FUZZ_PARSER names the one that this program tries.
#include <fcntl.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <span>
#include <string>

#include "runtime/base/exception.h"
#include "runtime/checkpoint/safetensors.h"
#include "runtime/checkpoint/safetensors_header.h"
#include "runtime/data/data_source.h"
#include "runtime/data/row_file.h"
#include "runtime/data/teacher_file.h"
#include "runtime/spec/adapter_config.h"
#include "runtime/spec/model_spec.h"
#include "swap/store_format.h"

namespace {

using tierflow::io::Error;

[[noreturn]] void defect() {
  __builtin_trap();
}
void expect_one_line(const std::string& text) {
  if (text.empty() || text.find('\n') != std::string::npos) defect();
}

// A folder in memory, of this process.
const std::filesystem::path& folder() {
  static const std::filesystem::path path = [] {
    const char* base = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    std::filesystem::path made = std::filesystem::path(base) / ("tierflow-fuzz-" + std::to_string(getpid()));
    std::filesystem::create_directories(made);
    static const struct Remover {
      std::filesystem::path path;
      ~Remover() { std::filesystem::remove_all(path); }
    } remover{made};
    return made;
  }();
  return path;
}
// In one file a name, which stays open.
std::filesystem::path file_of(const char* name, const std::string& bytes) {
  static std::map<std::string, int> open_files;
  const std::filesystem::path path = folder() / name;
  const auto [file, fresh] = open_files.try_emplace(name, -1);
  if (fresh) file->second = open(path.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
  const auto length = static_cast<ssize_t>(bytes.size());
  if (ftruncate(file->second, length) != 0 || pwrite(file->second, bytes.data(), bytes.size(), 0) != length)
    std::abort();
  return path;
}

struct CountingSink final : tierflow::DocumentSink {
  void begin_document(const std::string&) override {}
  void text(std::string_view piece) override { bytes += piece.size(); }
  void end_document() override {}
  void tokens(const std::string&, std::span<const std::uint32_t> ids) override { bytes += ids.size(); }
  void skip(const Error& why) override { expect_one_line(why.message()); }
  std::size_t bytes = 0;
};

[[maybe_unused]] void fuzz_config(const std::string& text) {
  tierflow::parse_model_spec(text, "fuzz");
}
// And what is read is written in a way that is read again, the same.
[[maybe_unused]] void fuzz_adapter(const std::string& text) {
  const std::string once = tierflow::adapter_config_json(tierflow::parse_adapter_config(text, "fuzz"), false);
  try {
    if (tierflow::adapter_config_json(tierflow::parse_adapter_config(once, "again"), false) != once) defect();
  } catch (const tierflow::Exception&) {
    defect();
  }
}
[[maybe_unused]] void fuzz_header(const std::string& text) {
  if (text.size() < 3) return;
  const auto data_bytes = static_cast<unsigned char>(text[0]) | static_cast<unsigned char>(text[1]) << 8;
  tierflow::parse_safetensors_header(text.substr(2), static_cast<std::uint64_t>(data_bytes), "fuzz");
}
[[maybe_unused]] void fuzz_index(const std::string& text) {
  static const bool once = [] {
    const std::string header = R"({"a":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}})";
    std::string file(8, '\0');
    file[0] = static_cast<char>(header.size());
    file_of("model-00001-of-00001.safetensors", file + header + "abcd");
    return true;
  }();
  (void)once;
  file_of("model.safetensors.index.json", text);
  tierflow::Checkpoint::open(folder());
}
[[maybe_unused]] void fuzz_manifest(const std::string& text) {
  if (auto found = tierflow::swap::parse_manifest(text); !found.ok()) expect_one_line(found.error().message());
}
void expect_sound_superblock(std::span<const std::byte> sector) {
  constexpr std::uint64_t kVolume = 1 << 20;
  if (const auto found = tierflow::swap::parse_superblock(sector, kVolume)) {
    if (found->manifest_length > kVolume || found->manifest_offset > kVolume - found->manifest_length) defect();
  } else {
    expect_one_line(tierflow::swap::why_no_superblock(sector));
  }
}
// As it is, and with a checksum that fits.
[[maybe_unused]] void fuzz_superblock(const std::string& text) {
  std::string sector = text;
  sector.resize(4096);
  expect_sound_superblock(std::as_bytes(std::span(sector)));
  tierflow::swap::Superblock block;
  std::memcpy(&block, sector.data(), sizeof block);
  block.checksum = block.own_checksum();
  std::memcpy(sector.data(), &block, sizeof block);
  expect_sound_superblock(std::as_bytes(std::span(sector)));
}
[[maybe_unused]] void fuzz_tokens(const std::string& text) {
  CountingSink sink;
  tierflow::read_npy(file_of("tokens.npy", text), sink);
}
[[maybe_unused]] void fuzz_records(const std::string& text) {
  CountingSink sink;
  tierflow::DataOptions options;
  options.skip_bad_records = !text.empty() && text[0] % 2 == 1;
  tierflow::read_source({.path = file_of("rows.jsonl", text), .kind = tierflow::SourceKind::jsonl}, options, sink);
}
// As it is, and as index and blocks behind a header that fits them: the first two bytes give sequences and K.
[[maybe_unused]] void fuzz_teacher(const std::string& text) {
  const auto read = [](const std::string& bytes) {
    try {
      const tierflow::TeacherFile file(file_of("teacher.tft", bytes));
      for (std::uint64_t sequence = 0; sequence < file.shape().sequences; ++sequence) {
        const tierflow::TeacherTokens tokens = file.read(sequence);
        if (tokens.ids.size() != tokens.log_probabilities.size() || tokens.ids.size() % file.shape().top != 0) defect();
        for (const std::uint32_t id : tokens.ids)
          if (id > file.largest_id()) defect();
      }
    } catch (const tierflow::Exception& error) {
      expect_one_line(error.what());
    }
  };
  read(text);
  if (text.size() < 2) return;
  const std::uint64_t sequences = text[0] & 3, top = 1 + (text[1] & 3), index = 16 * sequences;
  if (text.size() < 2 + index) return;
  const std::uint64_t positions = (text.size() - 2 - index) / (4 * top);
  const std::string body = text.substr(2, index + positions * 4 * top);
  std::string header = "TFTEACH\n" + std::string(72, '\0');
  const auto put = [&](std::size_t at, std::uint64_t value) { std::memcpy(&header[at], &value, sizeof value); };
  put(8, 1 | top << 32);
  put(16, 2 | std::uint64_t{999} << 32);
  put(24, 1000);
  put(32, 8);
  put(40, sequences);
  put(48, positions);
  put(64, XXH3_64bits(body.data(), index));
  put(72, XXH3_64bits(header.data(), 72));
  read(header + body);
}
// As it is, and as rows behind a header that fits them, but for the number of rows that the first byte gives.
[[maybe_unused]] void fuzz_rows(const std::string& text) {
  const auto read = [](const std::string& bytes) {
    const tierflow::RowFile file(file_of("rows.tfd", bytes));
    std::uint64_t rows = 0, tokens = 0;
    file.read_all([&](std::uint64_t, std::span<const std::uint32_t> row) {
      ++rows;
      tokens += row.size();
    });
    if (rows != file.counts().rows || tokens != file.counts().tokens) defect();
  };
  const std::string body = text.substr(0, text.size() / 4 * 4);
  const std::uint64_t words = body.size() / 4, rows = std::min<std::uint64_t>(words, body.empty() ? 0 : body[0] & 15);
  std::string header = "TFDROWS\n" + std::string(56, '\0');
  header[8] = 1;
  const auto put = [&](std::size_t at, std::uint64_t value) { std::memcpy(&header[at], &value, sizeof value); };
  put(16, rows);
  put(24, words - rows);
  put(40, XXH3_64bits(body.data(), body.size()));
  put(56, XXH3_64bits(header.data(), 56));
  try {
    read(header + body);
  } catch (const tierflow::Exception& error) {
    expect_one_line(error.what());
  }
  read(text);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    FUZZ_PARSER(std::string(reinterpret_cast<const char*>(data), size));
  } catch (const tierflow::Exception& error) {
    expect_one_line(error.what());
  }
  return 0;
}

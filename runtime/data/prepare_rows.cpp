#include "runtime/data/prepare_rows.h"

#include <fmt/format.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>

#include "runtime/base/exception.h"
#include "runtime/base/signals.h"
#include "runtime/data/row_format.h"
#include "runtime/data/row_frames.h"
#include "runtime/data/scripts.h"

namespace tierflow {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

constexpr std::uint64_t kLargestTemplate = 16 << 20;
constexpr std::size_t kPieceBytes = 1 << 20;
constexpr const char* kKeyVersion = "rows 1";

// What transformers may read of a tokenizer's folder.
bool is_tokenizer_file(const fs::path& path) {
  const std::string name = path.filename().string();
  return name.find("token") != std::string::npos || name.starts_with("chat_template") || name == "vocab.json" ||
         name == "merges.txt" || name == "vocab.txt" || name == "config.json";
}

class Key {
 public:
  Key() { XXH3_128bits_reset(&state_); }

  void text(std::string_view text) {
    const std::uint64_t size = text.size();
    XXH3_128bits_update(&state_, &size, sizeof size);
    XXH3_128bits_update(&state_, text.data(), text.size());
  }

  // read: the bytes so far.
  template <class Read>
  void content(const fs::path& path, Read read) {
    const File file = open_regular(path);
    const std::uint64_t size = file_size(file, path);
    XXH3_128bits_update(&state_, &size, sizeof size);
    std::vector<std::byte> piece;
    for (std::uint64_t offset = 0; offset < size; offset += piece.size()) {
      throw_if_stopped();
      piece.resize(std::min<std::uint64_t>(kPieceBytes, size - offset));
      read_exactly(file, path, offset, piece);
      XXH3_128bits_update(&state_, piece.data(), piece.size());
      read(piece.size());
    }
  }

  std::string name() const {
    const XXH128_hash_t hash = XXH3_128bits_digest(&state_);
    return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
  }

 private:
  XXH3_state_t state_{};
};

std::vector<fs::path> tokenizer_files(const fs::path& folder) {
  std::vector<fs::path> files;
  std::error_code error;
  const fs::path named = folder / "additional_chat_templates";
  for (const fs::path& place : {folder, named})
    for (fs::directory_iterator it(place, error), end; !error && it != end; it.increment(error))
      if ((place == named || is_tokenizer_file(it->path())) && fs::is_regular_file(it->path(), error))
        files.push_back(it->path());
  std::sort(files.begin(), files.end());
  return files;
}

class Preparation {
 public:
  Preparation(const DataOptions& options, const std::vector<Source>& sources, const std::vector<std::string>& formats)
      : options_(options), folder_(tokenizer_folder(options)) {
    job_ = {{"folder", folder_.empty() ? ordered_json() : ordered_json(folder_.string())},
            {"template", ordered_json()},
            {"train_on", options.train_on},
            {"field", options.jsonl_field},
            {"skip", options.skip_bad_records},
            {"files", ordered_json::array()}};
    if (!options.chat_template.empty()) job_["template"] = read_text(options.chat_template, kLargestTemplate);
    for (std::size_t i = 0; i < sources.size(); ++i) {
      job_["files"].push_back({{"path", sources[i].path.string()}, {"format", formats[i]}});
      bytes_ += file_size(open_regular(sources[i].path), sources[i].path);
    }
  }

  bool pairs() const { return job_["files"][0]["format"] == kPreferenceFormat; }
  // Equal where the rows are.
  std::string key() const {
    Key key;
    key.text(kKeyVersion);
    key.text(rows_script);
    for (const char* option : {"train_on", "field", "skip", "template"}) key.text(job_[option].dump());
    std::uint64_t done = 0;
    for (const auto& file : job_["files"]) {
      key.text(file["format"].get_ref<const std::string&>());
      key.content(file["path"].get_ref<const std::string&>(), [&](std::uint64_t bytes) {
        if (options_.progress) options_.progress("reading data", done += bytes, bytes_);
      });
    }
    if (!folder_.empty())
      for (const fs::path& file : tokenizer_files(folder_)) {
        key.text(file.filename().string());
        key.content(file, [](std::uint64_t) {});
      }
    return key.name();
  }

  void write(const fs::path& path) {
    RowFileWriter writer(path.parent_path());
    run(writer);
    ordered_json notes{{"files", job_["files"]},  {"train_on", options_.train_on}, {"masks", end_["masks"]},
                       {"untrained", untrained_}, {"skipped", skipped_},           {"first_skipped", first_skipped_},
                       {"merged", end_["merged"]}};
    writer.finish(path, notes.dump(), pairs());
  }

 private:
  void run(RowFileWriter& writer) {
    PythonProcess process(rows_job(options_, ""));
    send_json(process, job_);
    for (;;) {
      const Frame frame = receive_frame(process);
      if (frame.kind == 'R') {
        take_rows(frame.payload, writer);
        continue;
      }
      const ordered_json words = frame.json();
      if (frame.kind == 'E') {
        end_ = words;
        return;
      }
      if (skipped_++ == 0)
        first_skipped_ = words["where"].get<std::string>() + ": " + printable(words["why"].get<std::string>(), 700);
    }
  }

  void take_rows(std::span<const std::byte> payload, RowFileWriter& writer) {
    const auto take = [&](void* out, std::size_t bytes) {
      std::memcpy(out, payload.data(), bytes);
      payload = payload.subspan(bytes);
    };
    std::uint64_t done = 0;
    std::uint32_t rows = 0;
    take(&done, sizeof done);
    take(&rows, sizeof rows);
    std::vector<std::uint32_t> lengths(rows);
    take(lengths.data(), 4 * lengths.size());
    // Of a pair, both rows or none.
    std::vector<std::vector<std::uint32_t>> together(pairs() ? 2 : 1);
    for (std::size_t i = 0; i + together.size() <= lengths.size(); i += together.size()) {
      bool trained = true;
      for (std::size_t k = 0; k < together.size(); ++k) {
        together[k].resize(lengths[i + k]);
        take(together[k].data(), 4 * together[k].size());
        trained = trained && trained_targets(together[k]) != 0;
      }
      untrained_ += trained ? 0 : 1;
      for (const auto& row : together)
        if (trained) writer.add(row);
    }
    if (options_.progress) options_.progress("preparing data", done, bytes_);
  }

  const DataOptions& options_;
  const fs::path folder_;
  ordered_json job_, end_;
  std::uint64_t bytes_ = 0, untrained_ = 0, skipped_ = 0;
  std::string first_skipped_;
};

// What a cache holds can be made again: a file whose header is damaged is.
std::optional<RowFile> cached(const fs::path& path) {
  std::error_code ignored;
  if (!fs::exists(path, ignored)) return {};
  try {
    return RowFile(path);
  } catch (const Exception& error) {
    const io::ErrorKind kind = error.error().kind;
    if (kind != io::ErrorKind::corruption && kind != io::ErrorKind::input) throw;
    return {};
  }
}

}  // namespace

RowFile prepare_rows(const DataOptions& options, const std::vector<Source>& sources,
                     const std::vector<std::string>& formats) {
  const fs::path folder =
      options.row_cache.empty() && !cache_folder().empty() ? cache_folder() / "data" : options.row_cache;
  if (folder.empty())
    fail(io::ErrorKind::usage, "",
         "there is no folder to keep prepared data in, as neither XDG_CACHE_HOME nor HOME names one: name one "
         "(--data-cache)");
  Preparation preparation(options, sources, formats);
  const fs::path path = folder / (preparation.key() + ".tfd");
  if (auto file = cached(path)) return *std::move(file);
  make_folder(folder);
  preparation.write(path);
  return RowFile(path);
}

}  // namespace tierflow

#include "runtime/data/data_source.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <set>
#include <system_error>
#include <utility>

#include "runtime/base/exception.h"
#include "runtime/base/files.h"
#include "runtime/base/strict_json.h"
#include "runtime/base/utf8.h"
#include "runtime/data/line_reader.h"
#include "runtime/data/row_format.h"

namespace tierflow {
namespace {

constexpr std::size_t piece_bytes = 1 << 20;
constexpr std::size_t deepest_folder = 64;

std::optional<SourceKind> kind_of(const std::filesystem::path& path) {
  const std::string extension = path.extension().string();
  if (extension == ".txt" || extension == ".py" || extension == ".md") return SourceKind::text;
  if (extension == ".jsonl") return SourceKind::jsonl;
  if (extension == ".npy") return SourceKind::npy;
  if (extension == ".bin") return SourceKind::bin;
  if (extension == ".tfd") return SourceKind::rows;
  return std::nullopt;
}

void walk(const std::filesystem::path& folder, std::size_t depth, std::vector<Source>& found, OtherFiles& others) {
  if (depth > deepest_folder)
    fail_input(folder.string(), fmt::format("lies more than {} folders deep", deepest_folder));
  std::error_code error;
  std::vector<std::filesystem::directory_entry> entries;
  for (std::filesystem::directory_iterator it(folder, error), end; !error && it != end; it.increment(error))
    entries.push_back(*it);
  if (error) fail_system("list", folder.string(), error.value());
  std::sort(entries.begin(), entries.end());
  for (const auto& entry : entries) {
    if (entry.path().filename().string().front() == '.') continue;
    const bool folder = std::filesystem::is_directory(entry.symlink_status(error));
    if (!error && folder) walk(entry.path(), depth + 1, found, others);
    const auto kind = kind_of(entry.path());
    // Also one that a link names: folders that huggingface_hub makes are of these.
    if (!std::filesystem::is_regular_file(entry.status(error)) || error) continue;
    if (kind && *kind != SourceKind::rows)
      found.push_back({entry.path(), *kind});
    else if (others.count++ == 0)
      others.first = entry.path();
  }
}

// Of a file and links to it in one folder, or of several links, what was found first.
void leave_out_twice_found(std::vector<Source>& found, std::size_t first) {
  std::set<std::filesystem::path> files;
  const auto begin = found.begin() + static_cast<std::ptrdiff_t>(first);
  std::error_code error;
  found.erase(std::remove_if(begin, found.end(),
                             [&](const Source& source) {
                               const auto file = std::filesystem::canonical(source.path, error);
                               return !files.insert(error ? source.path : file).second;
                             }),
              found.end());
}

// By its byte-order mark.
void refuse_utf16(const std::string& where, std::string_view start) {
  if (start.starts_with("\xff\xfe") || start.starts_with("\xfe\xff"))
    fail_input(where, "is UTF-16 text, not UTF-8: convert it, with iconv -f UTF-16 -t UTF-8");
}

[[noreturn]] void fail_not_utf8(const std::string& where, std::uint64_t at) {
  fail_input(where,
             fmt::format("is not UTF-8 text at byte {}: convert it (Latin-1: iconv -f LATIN1 -t UTF-8), or pass over "
                         "such documents with --on-bad-row skip",
                         at));
}

// Calls `take` with the file's bytes, piece by piece; returns how many there are.
template <class Take>
std::uint64_t read_pieces(const std::filesystem::path& path, Take take) {
  const File file = open_regular(path);
  const std::uint64_t size = file_size(file, path);
  std::string piece;
  for (std::uint64_t offset = 0; offset < size; offset += piece.size()) {
    piece.resize(std::min<std::uint64_t>(piece_bytes, size - offset));
    read_exactly(file, path, offset, std::as_writable_bytes(std::span(piece.data(), piece.size())));
    take(std::string_view(piece));
  }
  return size;
}

constexpr std::string_view utf8_mark = "\xef\xbb\xbf";

// Throws where the file is no text: what else it may be, and how it becomes text.
void check_text(const std::filesystem::path& path) {
  const std::string where = path.string();
  std::string text;  // the bytes before that may begin a character, then a piece
  std::uint64_t at = 0;
  const std::uint64_t size = read_pieces(path, [&](std::string_view piece) {
    if (at == 0) refuse_utf16(where, piece);
    text += piece;
    const std::size_t zero = text.find('\0'), invalid = find_invalid_utf8(text);
    if (zero < invalid)
      fail_input(where, fmt::format("has a zero byte at {}: it is binary, or UTF-16 text. Convert text with iconv -f "
                                    "UTF-16 -t UTF-8; tokens go into .npy or .bin files",
                                    at + zero));
    if (invalid != std::string_view::npos && text.size() - invalid >= 4) fail_not_utf8(where, at + invalid);
    const std::size_t whole = std::min(invalid, text.size());
    text.erase(0, whole);
    at += whole;
  });
  if (at != size) fail_not_utf8(where, at);
}

void read_text_document(const std::filesystem::path& path, const DataOptions& options, DocumentSink& sink) {
  try {
    check_text(path);
  } catch (const Exception& error) {
    if (!options.skip_bad_records || error.error().kind != io::ErrorKind::input) throw;
    return sink.skip(error.error());
  }
  sink.begin_document(path.string());
  bool first = true;
  read_pieces(path, [&](std::string_view piece) {
    if (std::exchange(first, false) && piece.starts_with(utf8_mark)) piece.remove_prefix(utf8_mark.size());
    sink.text(piece);
  });
  sink.end_document();
}

class JsonLines {
 public:
  JsonLines(const std::filesystem::path& path, const DataOptions& options, DocumentSink& sink)
      : lines_(path), options_(options), sink_(sink) {}

  void read() {
    while (lines_.next(line_)) {
      if (line_.find_first_not_of(" \t\r") == std::string::npos) continue;
      try {
        emit();
      } catch (const Exception& error) {
        if (!options_.skip_bad_records || error.error().kind != io::ErrorKind::input || emitting_) throw;
        sink_.skip(error.error());
      }
    }
  }

 private:
  void emit() {
    const std::string where = lines_.where();
    if (lines_.number() == 1) refuse_utf16(where, line_);
    const Json record = parse_json(line_, where);
    const auto field = record.is_object() ? record.find(options_.jsonl_field) : record.end();
    if (field == record.end() || !field->is_string())
      fail_input(
          where,
          fmt::format(
              "is no row of a known format: it has no string \"{}\" (--jsonl-field names the text's field), and none "
              "of the others: {}",
              printable(options_.jsonl_field), kRowFormats));
    emitting_ = true;
    sink_.begin_document(where);
    sink_.text(field->get_ref<const std::string&>());
    sink_.end_document();
    emitting_ = false;
  }

  LineReader lines_;
  const DataOptions& options_;
  DocumentSink& sink_;
  std::string line_;
  bool emitting_ = false;
};

}  // namespace

std::vector<Source> list_sources(const std::vector<std::filesystem::path>& paths, OtherFiles& others) {
  if (paths.empty()) fail(io::ErrorKind::usage, "", "no data was given: name files or folders with --data");
  std::vector<Source> sources;
  for (const auto& path : paths) {
    std::error_code error;
    const auto status = std::filesystem::status(path, error);
    if (!std::filesystem::exists(status)) fail_input(path.string(), "does not exist");
    const std::size_t before = sources.size();
    if (std::filesystem::is_directory(status)) {
      walk(path, 0, sources, others);
      leave_out_twice_found(sources, before);
      if (sources.size() == before) fail_input(path.string(), "holds no .txt, .py, .md, .jsonl, .npy or .bin file");
      continue;
    }
    const auto kind = kind_of(path);
    if (!kind)
      fail_input(path.string(),
                 std::string("is of no known kind; data are .txt, .py, .md, .jsonl, .npy or .bin files, folders of "
                             "these, or a prepared .tfd file") +
                     (path.extension() == ".json" ? "; `jq -c '.[]' a.json > a.jsonl` makes lines of an array" : ""));
    sources.push_back({path, *kind});
  }
  return sources;
}

void read_source(const Source& source, const DataOptions& options, DocumentSink& sink) {
  switch (source.kind) {
    case SourceKind::text:
      read_text_document(source.path, options, sink);
      break;
    case SourceKind::jsonl:
      JsonLines(source.path, options, sink).read();
      break;
    case SourceKind::npy:
      read_npy(source.path, sink);
      break;
    case SourceKind::bin:
      read_bin(source.path, token_width(options.vocab_size), sink);
      break;
    case SourceKind::rows:
      break;  // holds no documents
  }
}

int token_width(std::int64_t vocab_size) {
  return vocab_size <= 65536 ? 2 : 4;
}

}  // namespace tierflow

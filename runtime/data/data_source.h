#pragma once
// The files of a dataset, and what is in them: documents of text or spans of tokens.
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/error.h"
#include "runtime/data/data.h"

namespace tierflow {

enum class SourceKind : std::uint8_t { text, jsonl, npy, bin, rows };

struct Source {
  std::filesystem::path path;
  SourceKind kind = SourceKind::text;
};

// Files in folders that are of no kind that is read there.
struct OtherFiles {
  std::int64_t count = 0;
  std::filesystem::path first;
};

// The files of `paths` in the order given, folders walked in the order of their names. Inside a folder, hidden files,
// links to folders and files of other kinds, or of prepared rows, are passed over (others: the last of these), and a
// file that is found twice is read once; a file named itself must be of a known kind.
std::vector<Source> list_sources(const std::vector<std::filesystem::path>& paths, OtherFiles& others);

// Receives the content of the files, in order.
class DocumentSink {
 public:
  virtual ~DocumentSink() = default;
  // A document: any number of text() calls with valid UTF-8 between them, then end_document(). `where` is the file, and
  // the line where there are lines.
  virtual void begin_document(const std::string& where) = 0;
  virtual void text(std::string_view piece) = 0;
  virtual void end_document() = 0;
  virtual void tokens(const std::string& where, std::span<const std::uint32_t> ids) = 0;
  // A record was skipped (skip_bad_records) for this reason.
  virtual void skip(const io::Error& why) = 0;
};

// A text file is UTF-8 without zero bytes, checked whole before any of it is given on; a byte-order mark is not part of
// its text.
void read_source(const Source& source, const DataOptions& options, DocumentSink& sink);

// Token files: a one-dimensional array of integers, or raw little-endian words of `width` bytes.
void read_npy(const std::filesystem::path& path, DocumentSink& sink);
void read_bin(const std::filesystem::path& path, int width, DocumentSink& sink);

// Bytes of one stored token: 2 if every id of the vocabulary fits, else 4.
int token_width(std::int64_t vocab_size);

}  // namespace tierflow

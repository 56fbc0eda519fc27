#pragma once
// Examples as tokens, prepared once and read at every start. Little-endian:
//
//     byte 0   "TFDROWS\n"
//          8   u32  version of the format: 1, or 2 of a file of pairs
//         12   u32  largest token id
//         16   u64  rows
//         24   u64  tokens
//         32   u64  trained tokens: marked, and not the first of their row
//         40   u64  XXH3 of the rows' bytes
//         48   u64  length of the notes
//         56   u64  XXH3 of bytes 0 to 55 and of the notes
//         64   the rows, one after the other: a u32, its number of tokens, then a u32 for each token: its id in
//              the lower 31 bits, and the top bit, set where it is trained on
//              the notes: a JSON object: what the rows were made of, and what became of those that are not here
//
// Each row is a document. Nothing follows the notes. In a file of pairs, two rows that follow one another are the
// chosen and the rejected answer to one prompt.
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "runtime/base/files.h"

namespace tierflow {

inline constexpr std::uint32_t kTrainedToken = 0x80000000u;

struct RowCounts {
  std::uint64_t rows = 0, tokens = 0, trained = 0;
  std::uint32_t largest_id = 0;
};

// Tokens of a row that are predicted and count.
std::uint64_t trained_targets(std::span<const std::uint32_t> row);

class RowFileWriter {
 public:
  // The bytes go to a nameless file in that folder, which has to be there.
  explicit RowFileWriter(const std::filesystem::path& folder);
  ~RowFileWriter();
  void add(std::span<const std::uint32_t> row);
  const RowCounts& counts() const { return counts_; }
  // Completes the file, flushes it and gives it that name, in the writer's folder.
  void finish(const std::filesystem::path& path, const std::string& notes, bool pairs = false);

 private:
  struct Hasher;
  void flush();

  std::filesystem::path folder_;
  File file_;
  std::vector<std::uint32_t> pending_;
  std::unique_ptr<Hasher> hasher_;
  RowCounts counts_;
};

class RowFile {
 public:
  // Reads the header and the notes. Throws Exception: input for a file of another format or version, corruption for one
  // that is damaged.
  explicit RowFile(std::filesystem::path path);

  const std::filesystem::path& path() const { return path_; }
  const RowCounts& counts() const { return counts_; }
  bool pairs() const { return pairs_; }
  const std::string& notes() const { return notes_; }
  std::uint64_t hash() const { return hash_; }  // of the rows
  // Calls `take` with each row and the place of its first token (in words from the first row). At the end all bytes
  // were compared with the checksum; throws Exception (corruption) where they differ, before or after calls of `take`.
  using Take = std::function<void(std::uint64_t first, std::span<const std::uint32_t> row)>;
  void read_all(const Take& take) const;
  void read(std::uint64_t first, std::span<std::uint32_t> words) const;

 private:
  [[noreturn]] void fail_damaged(const std::string& what) const;

  std::filesystem::path path_;
  File file_;
  RowCounts counts_;
  std::string notes_;
  bool pairs_ = false;
  std::uint64_t words_ = 0, hash_ = 0;
};

}  // namespace tierflow

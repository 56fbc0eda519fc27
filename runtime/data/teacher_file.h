#pragma once
// The tokens that a teacher found most likely at each position that is trained on, for the sequences of one dataset.
// Little-endian:
//
//     byte 0   "TFTEACH\n"
//          8   u32  version of the format: 1
//         12   u32  K: tokens at each position
//         16   u32  bytes of a token id: 2 or 4
//         20   u32  largest token id
//         24   u64  the teacher's vocabulary
//         32   u64  tokens in a sequence
//         40   u64  sequences
//         48   u64  positions, in all sequences
//         56   u64  Dataset::sequences_hash()
//         64   u64  XXH3 of the index
//         72   u64  XXH3 of bytes 0 to 71
//         80   the index: for each sequence, by its number in the dataset, a u64, the positions in all sequences before
//              it, and a u64, the XXH3 of its block
//              the blocks: for each position whose label counts, in the sequence's order, K token ids; then for each of
//              these positions K log-probabilities, natural log, fp16, none above 0, in falling order
//
// Nothing follows the blocks. No two ids of a position are equal.
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "runtime/base/files.h"
#include "runtime/base/progress.h"

namespace tierflow {

struct TeacherShape {
  std::uint32_t top = 0;  // K
  std::uint64_t vocabulary = 0, sequence_length = 0, sequences = 0, positions = 0, data = 0;
  std::uint32_t id_bytes() const { return vocabulary <= 65536 ? 2 : 4; }
  std::uint64_t position_bytes() const { return std::uint64_t{top} * (id_bytes() + 2); }
  std::uint64_t file_bytes() const;
};

// Of one sequence: [positions, K].
struct TeacherTokens {
  std::vector<std::uint32_t> ids;
  std::vector<std::uint16_t> log_probabilities;  // fp16
};

class TeacherFileWriter {
 public:
  // The bytes go to a file without a name in the folder of `path`. Throws Exception: environment where the drive has no
  // room for it, usage where something that is no file has the name.
  TeacherFileWriter(std::filesystem::path path, const TeacherShape& shape);
  // Appends the next sequence.
  void add(const TeacherTokens& tokens);
  // Completes the file, reads it back, and gives it its name. progress: of reading back.
  void finish(const Progress& progress);

 private:
  const std::filesystem::path path_;
  const TeacherShape shape_;
  File file_;
  std::uint64_t sequences_ = 0, positions_ = 0;
  std::uint32_t largest_ = 0;
};

class TeacherFile {
 public:
  // Reads the header and the index. Throws Exception: input for a file of another format or version, corruption for one
  // that is damaged.
  explicit TeacherFile(std::filesystem::path path);
  TeacherFile(File file, std::filesystem::path path);

  const File& file() const { return file_; }
  const std::filesystem::path& path() const { return path_; }
  const TeacherShape& shape() const { return shape_; }
  std::uint32_t largest_id() const { return largest_; }
  // A hash of the header, which has the hashes of all other bytes.
  std::uint64_t hash() const { return hash_; }
  // Reads a sequence and compares it with its checksum. Throws Exception (kind corruption).
  TeacherTokens read(std::uint64_t sequence) const;

 private:
  [[noreturn]] void fail_damaged(const std::string& what) const;
  void check_index() const;

  std::filesystem::path path_;
  File file_;
  TeacherShape shape_;
  std::uint32_t largest_ = 0;
  std::uint64_t hash_ = 0, index_hash_ = 0;
};

}  // namespace tierflow

#pragma once
// Reads the lines of a text file, one after the other, in bounded memory.
#include <cstdint>
#include <filesystem>
#include <string>

#include "runtime/base/files.h"

namespace tierflow {

class LineReader {
 public:
  // Throws Exception if the file cannot be opened.
  explicit LineReader(const std::filesystem::path& path);
  // The next line, without its end and without a byte-order mark at the file's begin; the last one may be empty. False
  // after it. Throws Exception (kind input), naming file and line, for a line of more than 64 MiB.
  bool next(std::string& line);
  // "FILE:NUMBER" for the line that next() gave.
  std::string where() const;
  std::uint64_t number() const { return number_; }

 private:
  bool fill();

  const std::filesystem::path path_;
  const File file_;
  const std::uint64_t size_;
  std::uint64_t offset_ = 0, number_ = 0;
  std::string piece_;
  std::size_t used_ = 0;
  bool ended_ = false;
};

}  // namespace tierflow

#include "runtime/data/line_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>

#include "runtime/base/exception.h"

namespace tierflow {
namespace {

constexpr std::size_t piece_bytes = 1 << 20;
constexpr std::size_t longest_line = 64 << 20;

}  // namespace

LineReader::LineReader(const std::filesystem::path& path)
    : path_(path), file_(open_regular(path)), size_(file_size(file_, path)) {}

bool LineReader::fill() {
  piece_.resize(std::min<std::uint64_t>(piece_bytes, size_ - offset_));
  read_exactly(file_, path_, offset_, std::as_writable_bytes(std::span(piece_.data(), piece_.size())));
  offset_ += piece_.size();
  used_ = 0;
  return !piece_.empty();
}

bool LineReader::next(std::string& line) {
  line.clear();
  if (ended_) return false;
  ++number_;
  for (;;) {
    if (used_ == piece_.size() && !fill()) {
      ended_ = true;
      break;
    }
    const std::size_t end = std::min(piece_.find('\n', used_), piece_.size());
    line.append(piece_, used_, end - used_);
    if (line.size() > longest_line) fail_input(where(), fmt::format("is longer than {} MiB", longest_line >> 20));
    used_ = std::min(end + 1, piece_.size());
    if (end < piece_.size()) break;
  }
  if (number_ == 1 && line.starts_with("\xef\xbb\xbf")) line.erase(0, 3);
  return true;
}

std::string LineReader::where() const {
  return fmt::format("{}:{}", path_.string(), number_);
}

}  // namespace tierflow

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <string_view>

#include "runtime/base/exception.h"
#include "runtime/base/files.h"
#include "runtime/data/data_source.h"

namespace tierflow {
namespace {

constexpr std::size_t piece_tokens = 256 << 10;

// Words of `width` bytes at [offset, end) as ids; a negative one is out of every vocabulary.
template <class Word>
void read_words(const File& file, const std::filesystem::path& path, std::uint64_t offset, std::uint64_t end,
                DocumentSink& sink) {
  std::vector<Word> words;
  std::vector<std::uint32_t> ids;
  while (offset < end) {
    const std::size_t count = std::min<std::uint64_t>(piece_tokens, (end - offset) / sizeof(Word));
    words.resize(count);
    ids.resize(count);
    read_exactly(file, path, offset, std::as_writable_bytes(std::span(words)));
    std::transform(words.begin(), words.end(), ids.begin(), [](Word word) {
      return word < 0 || static_cast<std::uint64_t>(word) > UINT32_MAX ? UINT32_MAX : static_cast<std::uint32_t>(word);
    });
    sink.tokens(path.string(), ids);
    offset += count * sizeof(Word);
  }
}

struct NpyHeader {
  std::string type;
  std::uint64_t count = 0, data_start = 0;
};

// What stands in `text` between `before` and the next `end`; empty where it does not.
std::string after(std::string_view text, std::string_view before, char end) {
  const auto start = text.find(before);
  if (start == std::string_view::npos) return {};
  text.remove_prefix(start + before.size());
  const auto stop = text.find(end);
  return stop == std::string_view::npos ? std::string() : std::string(text.substr(0, stop));
}

NpyHeader read_npy_header(const File& file, const std::filesystem::path& path) {
  const std::string where = path.string();
  const std::uint64_t size = file_size(file, path);
  unsigned char head[12] = {};
  if (size < sizeof head) fail_input(where, fmt::format("is {} bytes long: not a NumPy file", size));
  read_exactly(file, path, 0, std::as_writable_bytes(std::span(head)));
  if (std::memcmp(head, "\x93NUMPY", 6) != 0) fail_input(where, "is not a NumPy file: it does not start as one");
  const bool old = head[6] == 1;
  if (head[6] < 1 || head[6] > 3) fail_input(where, fmt::format("is of NumPy format {}; 1 to 3 are read", head[6]));
  const std::uint64_t start = old ? 10 : 12;
  const std::uint64_t length =
      old ? head[8] | head[9] << 8 : head[8] | head[9] << 8 | head[10] << 16 | std::uint64_t{head[11]} << 24;
  if (length > 65536 || length > size - start)
    fail_input(where, fmt::format("says that its header has {} bytes", length));
  std::string text(length, '\0');
  read_exactly(file, path, start, std::as_writable_bytes(std::span(text.data(), text.size())));

  // A Python dictionary: {'descr': '<u2', 'fortran_order': False, 'shape': (8,), }.
  const std::string type = after(text, "'descr': '", '\''), order = after(text, "'fortran_order': ", ',');
  const std::string shape = after(text, "'shape': (", ')');
  if (type.empty()) fail_input(where, "holds no plain array of numbers");
  std::uint64_t count = 0;
  const auto [rest, error] = std::from_chars(shape.data(), shape.data() + shape.size(), count);
  const std::string_view tail(rest, static_cast<std::size_t>(shape.data() + shape.size() - rest));
  if (order != "False" || error != std::errc() || (!tail.empty() && tail != ","))
    fail_input(where, "does not hold a one-dimensional array; save the tokens flattened, with numpy.ravel");
  return {.type = type, .count = count, .data_start = start + length};
}

// Ids in 32 bits, read as 16, have a zero behind each.
void refuse_wider_words(const File& file, const std::filesystem::path& path, std::uint64_t size) {
  std::vector<std::uint16_t> words(std::min<std::uint64_t>(size / 2, 8192) / 2 * 2);
  if (words.size() < 64) return;
  read_exactly(file, path, 0, std::as_writable_bytes(std::span(words)));
  bool ids = false;
  for (std::size_t i = 0; i < words.size(); i += 2) {
    ids = ids || words[i] != 0;
    if (words[i + 1] != 0) return;
  }
  if (ids)
    fail_input(path.string(),
               "looks like words of 32 bits: tokens of this vocabulary are little-endian uint16 (a .npy file says of "
               "which type its ids are)");
}

}  // namespace

void read_npy(const std::filesystem::path& path, DocumentSink& sink) {
  const File file = open_regular(path);
  const NpyHeader header = read_npy_header(file, path);
  const std::uint64_t available = file_size(file, path) - header.data_start;
  const auto read = [&]<class Word>(Word) {
    if (header.count > available / sizeof(Word) || header.count * sizeof(Word) != available)
      fail_input(path.string(), fmt::format("holds {} bytes of data, not {} elements of type {}: truncated?", available,
                                            header.count, printable(header.type)));
    read_words<Word>(file, path, header.data_start, header.data_start + available, sink);
  };
  if (header.type == "|u1") return read(std::uint8_t{});
  if (header.type == "<u2") return read(std::uint16_t{});
  if (header.type == "<u4") return read(std::uint32_t{});
  if (header.type == "<i2") return read(std::int16_t{});
  if (header.type == "<i4") return read(std::int32_t{});
  if (header.type == "<i8") return read(std::int64_t{});
  if (header.type == "<u8") return read(std::uint64_t{});
  fail_input(path.string(),
             fmt::format("holds elements of type {}; tokens are little-endian integers, such as numpy.uint16",
                         printable(header.type)));
}

void read_bin(const std::filesystem::path& path, int width, DocumentSink& sink) {
  const File file = open_regular(path);
  const std::uint64_t size = file_size(file, path);
  if (size % static_cast<unsigned>(width) != 0)
    fail_input(path.string(),
               fmt::format("is {} bytes long, not a multiple of {}: tokens of this vocabulary are little-endian uint{}",
                           size, width, 8 * width));
  if (width == 2) {
    refuse_wider_words(file, path, size);
    return read_words<std::uint16_t>(file, path, 0, size, sink);
  }
  read_words<std::uint32_t>(file, path, 0, size, sink);
}

}  // namespace tierflow

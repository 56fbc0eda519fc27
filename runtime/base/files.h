#pragma once
// Files from strangers. Opening one never follows a path out of its folder and never blocks on a pipe or a device. It
// is read by pread, and its size is limited before anything is allocated.
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/descriptor.h"

namespace tierflow {

using File = io::Descriptor;

// A regular file, for reading. Throws Exception: input where it is missing or is no regular file.
File open_regular(const std::filesystem::path& path);

// The regular file `name` (one path component) of `folder`, for reading. A symbolic link is followed only where it
// stays inside the folder, or, in a folder of the Hugging Face cache (.../snapshots/REVISION), inside that model's
// cache folder.
File open_beneath(const std::filesystem::path& folder, const std::string& name);

std::uint64_t file_size(const File& file, const std::filesystem::path& path);

// All of `out`, from `offset`. A file that ends before is an error of kind corruption: it had that length when it was
// opened.
void read_exactly(const File& file, const std::filesystem::path& path, std::uint64_t offset, std::span<std::byte> out);
// Where the file stands, or at `offset`.
void write_exactly(const File& file, const std::filesystem::path& path, std::span<const std::byte> bytes,
                   std::optional<std::uint64_t> offset = {});

// The whole of a small text file; input error above `limit` bytes.
std::string read_text(const std::filesystem::path& path, std::uint64_t limit);
std::string read_text(const File& file, const std::filesystem::path& path, std::uint64_t limit);

// Replaces `path` by what `fill` writes to a file with a temporary name, flushed before it is renamed: a reader sees
// the old file or the whole new one. mode: its permissions, less those that the umask takes away.
void replace_file(const std::filesystem::path& path, unsigned mode,
                  const std::function<void(const File& file, const std::filesystem::path& temporary)>& fill);
// The same with a text.
void write_text(const std::filesystem::path& path, std::string_view text, unsigned mode = 0644);

// The same with the content of an open file, from its beginning.
void write_copy(const std::filesystem::path& path, const File& from, const std::filesystem::path& from_path);

// Flushes the folder's own entries to the drive, where its file system can do that.
void sync_folder(const std::filesystem::path& folder);

// Creates the folder and those above it. Throws Exception naming it.
void make_folder(const std::filesystem::path& folder);

// Bytes that its file system has free for this user. Throws Exception naming it.
std::uint64_t free_space(const std::filesystem::path& folder);

// A new file that has no name in that folder, for reading and writing: it goes with its descriptor.
File create_nameless(const std::filesystem::path& folder);
// Gives it that name, flushed before, and flushes the name: a reader sees the file that had the name before, or the
// whole new one.
void name_file(const File& file, const std::filesystem::path& path);

// Where what is worth keeping between runs lies: $XDG_CACHE_HOME/tierflow or ~/.cache/tierflow; empty where neither is
// known.
std::filesystem::path cache_folder();

// The folder for temporary files, TMPDIR or /tmp. Throws Exception of kind environment where that is no folder.
std::filesystem::path temporary_folder();

// Makes the folder like make_folder(). At the end of its life it removes what it made, as far as that is empty.
class BorrowedFolder {
 public:
  explicit BorrowedFolder(const std::filesystem::path& folder);
  ~BorrowedFolder();
  BorrowedFolder(const BorrowedFolder&) = delete;
  BorrowedFolder& operator=(const BorrowedFolder&) = delete;

 private:
  std::vector<std::filesystem::path> made_;  // inner ones first
};

// Text of unknown origin made fit for one line of a message: control and non-ASCII bytes as '?', cut at `limit`
// characters.
std::string printable(std::string_view text, std::size_t limit = 80);

// What a file is, from its first bytes, if it has a format that people mistake for safetensors ("a pickle", "a zip
// archive ..."); empty otherwise.
std::string describe_foreign(std::span<const std::byte> head);

}  // namespace tierflow

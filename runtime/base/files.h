#pragma once
// Files that may be hostile. Opening one never follows a path out of its folder and never blocks on a pipe or a device.
// It is read with pread, and its size is limited before anything is allocated.
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

// Opens a regular file for reading. Throws Exception (kind input) if it is missing or not a regular file.
File open_regular(const std::filesystem::path& path);

// Opens the regular file `name` (one path component) in `folder` for reading. A symbolic link is followed only if it
// stays inside the folder, or, in a folder of the Hugging Face cache (.../snapshots/REVISION, or one in it), inside
// that model's cache folder.
File open_beneath(const std::filesystem::path& folder, const std::string& name);

std::uint64_t file_size(const File& file, const std::filesystem::path& path);

// Fills all of `out` from `offset`. If the file ends earlier, that is an error of kind corruption, because it had that
// length when it was opened.
void read_exactly(const File& file, const std::filesystem::path& path, std::uint64_t offset, std::span<std::byte> out);
// Writes at the file's position, or at `offset`.
void write_exactly(const File& file, const std::filesystem::path& path, std::span<const std::byte> bytes,
                   std::optional<std::uint64_t> offset = {});

// The whole of a small text file. Throws Exception (kind input) if it has more than `limit` bytes.
std::string read_text(const std::filesystem::path& path, std::uint64_t limit);
std::string read_text(const File& file, const std::filesystem::path& path, std::uint64_t limit);

// Replaces `path` with what `fill` writes. `fill` writes to a file with a temporary name, which is flushed before it is
// renamed, so a reader sees the old file or the whole new one. mode: its permissions before the umask.
void replace_file(const std::filesystem::path& path, unsigned mode,
                  const std::function<void(const File& file, const std::filesystem::path& temporary)>& fill);
// The same with a text.
void write_text(const std::filesystem::path& path, std::string_view text, unsigned mode = 0644);

// The same with the content of an open file, from its beginning.
void write_copy(const std::filesystem::path& path, const File& from, const std::filesystem::path& from_path);

// Flushes the folder's own entries to the drive, if its file system can do that.
void sync_folder(const std::filesystem::path& folder);

// Creates the folder and those above it. Throws Exception, which names the folder.
void make_folder(const std::filesystem::path& folder);

// Bytes that the folder's file system has free for this user. Throws Exception, which names the folder.
std::uint64_t free_space(const std::filesystem::path& folder);

// A new file without a name in that folder, for reading and writing. It disappears when its descriptor is closed.
File create_nameless(const std::filesystem::path& folder);
// Flushes a file of create_nameless(), gives it that name, and flushes the name. A reader sees the file that had the
// name before, or the whole new one.
void name_file(const File& file, const std::filesystem::path& path);

// The folder for what is kept between runs: $XDG_CACHE_HOME/tierflow or ~/.cache/tierflow; empty if neither is known.
std::filesystem::path cache_folder();

// The folder for temporary files, TMPDIR or /tmp. Throws Exception (kind environment) if that is not a folder.
std::filesystem::path temporary_folder();

// Makes the folder like make_folder(). Its destructor removes those folders that it made and that are empty.
class BorrowedFolder {
 public:
  explicit BorrowedFolder(const std::filesystem::path& folder);
  ~BorrowedFolder();
  BorrowedFolder(const BorrowedFolder&) = delete;
  BorrowedFolder& operator=(const BorrowedFolder&) = delete;

 private:
  std::vector<std::filesystem::path> made_;  // inner ones first
};

// Makes text of unknown origin fit for one line of a message: control and non-ASCII bytes become '?', and it is cut at
// `limit` characters.
std::string printable(std::string_view text, std::size_t limit = 80);

// What a file is, from its first bytes, if it has a format that people mistake for safetensors ("a pickle", "a zip
// archive ..."); empty otherwise.
std::string describe_foreign(std::span<const std::byte> head);

}  // namespace tierflow

#include "runtime/base/files.h"

#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <system_error>

#include "io/filesystem.h"
#include "runtime/base/exception.h"

namespace tierflow {
namespace {

constexpr int read_flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY;

int open_resolved(int folder, const std::string& path) {
  open_how how{};
  how.flags = read_flags;
  how.resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS;
  return static_cast<int>(syscall(SYS_openat2, folder, path.c_str(), &how, sizeof how));
}

File checked_regular(File file, const std::filesystem::path& path) {
  struct stat status {};
  if (fstat(file.fd(), &status) != 0) fail_system("stat", path.string(), errno);
  if (S_ISDIR(status.st_mode)) fail_input(path.string(), "is a folder where a file is expected");
  if (!S_ISREG(status.st_mode))
    fail_input(path.string(), "is not a regular file (a device, a pipe or a socket); give a file");
  return file;
}

}  // namespace

File open_regular(const std::filesystem::path& path) {
  File file(open(path.c_str(), read_flags));
  if (!file) fail_system("open", path.string(), errno);
  return checked_regular(std::move(file), path);
}

File open_beneath(const std::filesystem::path& folder, const std::string& name) {
  const std::filesystem::path path = folder / name;
  if (name.empty() || name == "." || name == ".." || name.find('/') != std::string::npos ||
      name.find('\0') != std::string::npos)
    fail_input(folder.string(),
               "names the file \"" + printable(name) + "\", which is not a plain name inside the folder");
  File root(open(folder.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (!root) fail_system("open", folder.string(), errno);
  File file(open_resolved(root.fd(), name));
  if (!file && errno == EXDEV) {
    std::error_code ignored;
    const std::filesystem::path real = std::filesystem::canonical(folder, ignored);
    std::filesystem::path snapshots = real.parent_path();
    if (snapshots.filename() != "snapshots") snapshots = snapshots.parent_path();
    if (!ignored && snapshots.filename() == "snapshots") {
      const std::filesystem::path model = snapshots.parent_path();
      File cache(open(model.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
      if (cache) file = File(open_resolved(cache.fd(), (real.lexically_relative(model) / name).string()));
    } else {
      errno = EXDEV;
    }
    if (!file) fail_input(path.string(), "is a symbolic link that leads out of its folder; copy the file there");
  }
  // A kernel or a sandbox without openat2: no symbolic link at all.
  if (!file && (errno == ENOSYS || errno == EPERM || errno == EINVAL))
    file = File(openat(root.fd(), name.c_str(), read_flags | O_NOFOLLOW));
  if (!file) fail_system("open", path.string(), errno);
  return checked_regular(std::move(file), path);
}

std::uint64_t file_size(const File& file, const std::filesystem::path& path) {
  struct stat status {};
  if (fstat(file.fd(), &status) != 0) fail_system("stat", path.string(), errno);
  return static_cast<std::uint64_t>(status.st_size);
}

void read_exactly(const File& file, const std::filesystem::path& path, std::uint64_t offset, std::span<std::byte> out) {
  const io::Moved moved = io::read_all(file.fd(), offset, out);
  if (moved.bytes == out.size()) return;
  const bool ended = moved.error_number == 0;
  throw Exception(io::Error{.kind = ended ? io::ErrorKind::corruption : io::ErrorKind::io,
                            .operation = "read",
                            .path = path.string(),
                            .offset = offset + moved.bytes,
                            .length = out.size() - moved.bytes,
                            .error_number = moved.error_number,
                            .detail = ended ? "the file became shorter while it was read" : ""});
}

void write_exactly(const File& file, const std::filesystem::path& path, std::span<const std::byte> bytes,
                   std::optional<std::uint64_t> offset) {
  const io::Moved moved = io::write_all(file.fd(), offset, bytes);
  if (moved.bytes < bytes.size()) fail_system("write", path.string(), moved.error_number);
}

std::string read_text(const File& file, const std::filesystem::path& path, std::uint64_t limit) {
  const std::uint64_t size = file_size(file, path);
  if (size > limit)
    fail_input(path.string(), "is " + std::to_string(size) + " bytes long, more than the " + std::to_string(limit) +
                                  " that such a file may have");
  std::string text(size, '\0');
  read_exactly(file, path, 0, std::as_writable_bytes(std::span(text.data(), text.size())));
  return text;
}

std::string read_text(const std::filesystem::path& path, std::uint64_t limit) {
  return read_text(open_regular(path), path, limit);
}

void replace_file(const std::filesystem::path& path, unsigned mode,
                  const std::function<void(const File& file, const std::filesystem::path& temporary)>& fill) {
  const std::filesystem::path temporary = path.string() + ".partial";
  const File file(open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, mode));
  if (!file) fail_system("create", temporary.string(), errno);
  try {
    fill(file, temporary);
    if (fsync(file.fd()) != 0) fail_system("flush", temporary.string(), errno);
    if (rename(temporary.c_str(), path.c_str()) != 0) fail_system("rename", path.string(), errno);
  } catch (...) {
    unlink(temporary.c_str());
    throw;
  }
}

void write_text(const std::filesystem::path& path, std::string_view text, unsigned mode) {
  replace_file(path, mode, [&](const File& file, const std::filesystem::path& temporary) {
    write_exactly(file, temporary, std::as_bytes(std::span(text.data(), text.size())));
  });
}

void write_copy(const std::filesystem::path& path, const File& from, const std::filesystem::path& from_path) {
  std::vector<std::byte> piece(std::size_t{1} << 20);
  const std::uint64_t size = file_size(from, from_path);
  replace_file(path, 0644, [&](const File& file, const std::filesystem::path& temporary) {
    for (std::uint64_t offset = 0; offset < size; offset += piece.size()) {
      const auto bytes = std::span(piece).first(std::min<std::uint64_t>(piece.size(), size - offset));
      read_exactly(from, from_path, offset, bytes);
      write_exactly(file, temporary, bytes);
    }
  });
}

File create_nameless(const std::filesystem::path& folder) {
  File file(open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0644));
  if (file) return file;
  std::string name = (folder / "tierflow-XXXXXX").string();
  file = File(mkostemp(name.data(), O_CLOEXEC));
  if (!file) fail_system("create a file in", folder.string(), errno);
  unlink(name.c_str());
  return file;
}

void name_file(const File& file, const std::filesystem::path& path) {
  if (fsync(file.fd()) != 0) fail_system("flush", path.string(), errno);
  const std::string temporary = path.string() + "." + std::to_string(getpid()) + ".partial";
  const std::string descriptor = "/proc/self/fd/" + std::to_string(file.fd());
  if (linkat(AT_FDCWD, descriptor.c_str(), AT_FDCWD, temporary.c_str(), AT_SYMLINK_FOLLOW) != 0) {
    write_copy(path, file, path);  // a file system where a name that is gone does not come back
  } else if (rename(temporary.c_str(), path.c_str()) != 0) {
    const int error = errno;
    unlink(temporary.c_str());
    fail_system("rename", path.string(), error);
  }
  sync_folder(path.has_parent_path() ? path.parent_path() : ".");
}

std::filesystem::path cache_folder() {
  if (const char* cache = std::getenv("XDG_CACHE_HOME"); cache != nullptr && cache[0] == '/')
    return std::filesystem::path(cache) / "tierflow";
  if (const char* home = std::getenv("HOME"); home != nullptr && home[0] == '/')
    return std::filesystem::path(home) / ".cache/tierflow";
  return {};
}

void sync_folder(const std::filesystem::path& folder) {
  if (const io::Error error = io::sync_directory(folder)) fail_system("flush", folder.string(), error.error_number);
}

std::uint64_t free_space(const std::filesystem::path& folder) {
  struct statvfs status {};
  if (statvfs(folder.c_str(), &status) != 0) fail_system("stat", folder.string(), errno);
  return std::uint64_t{status.f_bavail} * status.f_frsize;
}

std::filesystem::path temporary_folder() {
  const char* named = std::getenv("TMPDIR");
  const std::filesystem::path folder = named != nullptr && *named != '\0' ? named : "/tmp";
  std::error_code error;
  if (std::filesystem::is_directory(folder, error)) return folder;
  throw Exception(io::Error{.kind = io::ErrorKind::environment,
                            .operation = "use",
                            .path = folder.string(),
                            .error_number = error ? error.value() : ENOTDIR,
                            .detail = "temporary files go there: set TMPDIR to a folder"});
}

void make_folder(const std::filesystem::path& folder) {
  std::error_code error;
  const auto kind = std::filesystem::status(folder, error).type();
  if (kind == std::filesystem::file_type::not_found && std::filesystem::is_symlink(folder, error))
    fail_input(folder.string(), "is a link to what is not there: make that, or name another folder");
  if (kind == std::filesystem::file_type::regular) fail_input(folder.string(), "is a file: name a folder");
  std::filesystem::create_directories(folder, error);
  if (error) fail_system("create folder", folder.string(), error.value());
  if (!std::filesystem::is_directory(folder, error)) fail_input(folder.string(), "exists and is not a folder");
}

BorrowedFolder::BorrowedFolder(const std::filesystem::path& folder) {
  std::error_code ignored;
  auto path = std::filesystem::absolute(folder, ignored).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();
  for (; path.has_filename() && !std::filesystem::exists(path, ignored); path = path.parent_path())
    made_.push_back(path);
  make_folder(folder);
}

BorrowedFolder::~BorrowedFolder() {
  std::error_code in_use;
  for (const auto& path : made_) std::filesystem::remove(path, in_use);
}

std::string printable(std::string_view text, std::size_t limit) {
  std::string line;
  for (const char c : text.substr(0, limit)) line += c >= 0x20 && c < 0x7f ? c : '?';
  if (text.size() > limit) line += "...";
  return line;
}

std::string describe_foreign(std::span<const std::byte> head) {
  const std::string_view text(reinterpret_cast<const char*>(head.data()), head.size());
  const auto starts = [&](std::string_view magic) { return text.substr(0, magic.size()) == magic; };
  if (starts("PK\x03\x04")) return "a zip archive, as torch.save writes, which holds a pickle";
  if (text.size() >= 2 && text[0] == '\x80' && text[1] >= 2 && text[1] <= 5) return "a pickle";
  if (starts("GGUF")) return "a GGUF file";
  if (starts("version https://git-lfs")) return "a Git LFS pointer, not the file itself (run `git lfs pull`)";
  if (starts("<!DOCTYPE") || starts("<!doctype") || starts("<html") || starts("<HTML"))
    return "an HTML page, not a model";
  if (starts("\x89HDF")) return "an HDF5 file";
  if (starts("\x1f\x8b")) return "a gzip archive";
  if (starts("\x93NUMPY")) return "a NumPy array";
  return {};
}

}  // namespace tierflow

#include "runtime/base/sequential_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <future>
#include <utility>

#include "io/checksum.h"
#include "io/descriptor.h"
#include "io/thread.h"
#include "runtime/base/exception.h"

namespace tierflow {
namespace {

constexpr std::size_t piece_bytes = 4 << 20, alignment = 4096;
// Of a file that goes through the page cache: it is pushed out and dropped in windows of this size.
constexpr std::uint64_t window = 64 << 20;

// With O_DIRECT where the file system allows that.
File open_past_cache(const std::filesystem::path& path, int flags) {
  File file(::open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW | O_DIRECT, 0644));
  if (!file && errno == EINVAL) file = File(::open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW, 0644));
  return file;
}

}  // namespace

SequentialFile::SequentialFile(std::filesystem::path path) : path_(std::move(path)) {
  for (auto& piece : pieces_) {
    piece.reset(static_cast<std::byte*>(std::aligned_alloc(alignment, piece_bytes)));
    if (!piece) fail_system("allocate memory to write", path_.string(), ENOMEM);
  }
  file_ = open_past_cache(path_, O_WRONLY | O_CREAT | O_TRUNC);
  if (!file_) fail_system("create", path_.string(), errno);
  direct_ = (fcntl(file_.fd(), F_GETFL) & O_DIRECT) != 0;
  if (io::Error error = io::start_thread(thread_, "tierflow-write", [this] { write_pieces(); })) {
    unlink(path_.c_str());
    throw Exception(std::move(error));
  }
}

SequentialFile::~SequentialFile() {
  {
    std::lock_guard lock(mutex_);
    ended_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void SequentialFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const std::size_t count = std::min(bytes.size(), piece_bytes - filled_);
    std::memcpy(pieces_[filling_].get() + filled_, bytes.data(), count);
    filled_ += count;
    bytes = bytes.subspan(count);
    if (filled_ == piece_bytes) hand_over();
  }
}

void SequentialFile::finish() {
  hand_over();
  std::unique_lock lock(mutex_);
  wait_until_written(lock);
  if (fsync(file_.fd()) != 0) fail_system("flush", path_.string(), errno);
  if (!direct_) posix_fadvise(file_.fd(), 0, 0, POSIX_FADV_DONTNEED);
  read_back();
}

void SequentialFile::hand_over() {
  if (before_ && filled_ != 0) before_(filled_);
  std::unique_lock lock(mutex_);
  wait_until_written(lock);
  if (filled_ != 0) hashes_.push_back(io::content_hash({pieces_[filling_].get(), filled_}));
  handed_over_ = std::exchange(filled_, 0);
  filling_ = 1 - filling_;
  changed_.notify_all();
}

void SequentialFile::wait_until_written(std::unique_lock<std::mutex>& lock) {
  changed_.wait(lock, [&] { return handed_over_ == 0; });
  if (error_) std::rethrow_exception(error_);
}

void SequentialFile::write_pieces() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return handed_over_ != 0 || ended_; });
    if (ended_) return;
    const std::span<const std::byte> piece(pieces_[1 - filling_].get(), handed_over_);
    lock.unlock();
    std::exception_ptr error;
    try {
      write_piece(piece);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    if (error) error_ = error;
    handed_over_ = 0;
    changed_.notify_all();
  }
}

void SequentialFile::write_piece(std::span<const std::byte> piece) {
  if (const std::size_t blocks = piece.size() / alignment * alignment; direct_ && blocks != 0) {
    const io::Moved moved = io::write_all(file_.fd(), {}, piece.first(blocks));
    if (moved.error_number != 0 && moved.error_number != EINVAL)
      fail_system("write", path_.string(), moved.error_number);
    piece = piece.subspan(moved.bytes);
    written_ += moved.bytes;
  }
  if (piece.empty()) return;
  // The end of the file, or a file system that moves no such blocks after all: the rest goes through the page cache.
  if (std::exchange(direct_, false)) {
    if (fcntl(file_.fd(), F_SETFL, 0) != 0) fail_system("open without O_DIRECT", path_.string(), errno);
    pushed_ = written_;
  }
  write_exactly(file_, path_, piece);
  written_ += piece.size();
  push_out();
}

// A write that failed on its way to the drive is reported once, to whoever waits for it first: fsync() may be too late.
void SequentialFile::sync(std::uint64_t begin, unsigned how) {
  if (sync_file_range(file_.fd(), static_cast<off64_t>(begin), static_cast<off64_t>(window), how) == 0) return;
  const int error = errno;
  if (error != ENOSYS && error != EINVAL && error != ESPIPE && error != EOPNOTSUPP)
    fail_system("flush", path_.string(), error);
}

void SequentialFile::read_back() {
  const File file = open_past_cache(path_, O_RDONLY);
  if (!file) fail_system("open", path_.string(), errno);
  const auto piece = [&](std::size_t index) {
    return std::span(pieces_[index % 2].get(), std::min(piece_bytes, written_ - index * piece_bytes));
  };
  const auto fetch = [&](std::size_t index) {
    const std::span<std::byte> into = piece(index);
    const std::uint64_t at = index * piece_bytes;
    const std::size_t blocks = (into.size() + alignment - 1) / alignment * alignment;
    const ssize_t moved = pread(file.fd(), into.data(), blocks, static_cast<off_t>(at));
    const std::size_t bytes = moved < 0 ? 0 : static_cast<std::size_t>(moved);
    if (bytes >= into.size()) return;
    // A file system that moves no such blocks, or an error, which comes again.
    if (fcntl(file.fd(), F_SETFL, 0) != 0) fail_system("open without O_DIRECT", path_.string(), errno);
    read_exactly(file, path_, at + bytes, into.subspan(bytes));
  };
  std::future<void> arrives;
  for (std::size_t index = 0; index < hashes_.size(); ++index) {
    if (before_) before_(piece(index).size());
    if (index == 0) arrives = std::async(fetch, index);
    arrives.get();
    if (index + 1 < hashes_.size()) arrives = std::async(fetch, index + 1);
    if (io::content_hash(piece(index)) != hashes_[index])
      throw Exception({.kind = io::ErrorKind::corruption,
                       .operation = "read back",
                       .path = path_.string(),
                       .offset = index * piece_bytes,
                       .length = piece(index).size(),
                       .detail = "the drive gives other bytes than were written: check the drive and the memory, or "
                                 "write to another drive"});
  }
  posix_fadvise(file.fd(), 0, 0, POSIX_FADV_DONTNEED);
}

void SequentialFile::push_out() {
  if (written_ - pushed_ < 2 * window) return;
  // Waits for the window before the newest one, which is on its way to the drive.
  sync(pushed_ + window, SYNC_FILE_RANGE_WRITE);
  sync(pushed_, SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
  posix_fadvise(file_.fd(), static_cast<off_t>(pushed_), static_cast<off_t>(window), POSIX_FADV_DONTNEED);
  pushed_ += window;
}

}  // namespace tierflow

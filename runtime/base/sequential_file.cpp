#include "runtime/base/sequential_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "io/checksum.h"
#include "io/descriptor.h"
#include "io/file.h"
#include "io/thread.h"
#include "runtime/base/exception.h"

namespace tierflow {
namespace {

constexpr std::size_t piece_bytes = 4 << 20, alignment = 4096;
// Of a file that goes through the page cache: it is pushed out and dropped in windows of this size.
constexpr std::uint64_t window = 64 << 20;

}  // namespace

SequentialFile::SequentialFile(std::filesystem::path path, std::uint64_t bytes)
    : path_(std::move(path)),
      bytes_(bytes),
      hashes_((bytes + piece_bytes - 1) / piece_bytes),
      free_(io::allocate_buffers(lanes + 1, piece_bytes)) {
  if (free_.empty()) fail_system("allocate memory to write", path_.string(), ENOMEM);
  open(O_WRONLY | O_CREAT | O_TRUNC);
  try {
    reserve_room();
    for (std::thread& thread : threads_)
      throw_if(io::start_thread(thread, "tierflow-write", [this] { move_pieces(); }));
  } catch (...) {
    end_lanes();
    unlink(path_.c_str());
    throw;
  }
}

SequentialFile::~SequentialFile() {
  end_lanes();
}

void SequentialFile::end_lanes() {
  {
    std::lock_guard lock(mutex_);
    ended_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_)
    if (thread.joinable()) thread.join();
}

void SequentialFile::open(int flags) {
  constexpr int always = O_CLOEXEC | O_NOFOLLOW;
  file_ = File(::open(path_.c_str(), flags | always, 0644));
  if (!file_) fail_system((flags & O_CREAT) != 0 ? "create" : "open", path_.string(), errno);
  direct_file_ = File(::open(path_.c_str(), (flags & O_ACCMODE) | O_DIRECT | always));
  direct_ = static_cast<bool>(direct_file_);
}

// Pieces that make the file longer are written one after the other, because the file system takes them so.
void SequentialFile::reserve_room() {
  if (bytes_ == 0) return;
  const int status = io::reserve_space(file_.fd(), bytes_);
  if (status == ENOSPC || status == EDQUOT || status == EFBIG || status == EIO)
    fail_system("reserve room for", path_.string(), status);
  together_ = direct_ && status == 0;
}

void SequentialFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    if (!filling_) filling_ = free_buffer();
    const std::size_t count = std::min(bytes.size(), piece_bytes - filled_);
    if (count > bytes_ - handed_over_ - filled_)
      fail(io::ErrorKind::usage, path_.string(), "more bytes are written than were announced");
    std::memcpy(filling_.data() + filled_, bytes.data(), count);
    filled_ += count;
    bytes = bytes.subspan(count);
    if (filled_ == piece_bytes) hand_over_filled();
  }
}

void SequentialFile::finish() {
  hand_over_filled();
  wait_until_moved();
  if (handed_over_ != bytes_)
    fail(io::ErrorKind::usage, path_.string(), "fewer bytes were written than were announced");
  if (fsync(file_.fd()) != 0) fail_system("flush", path_.string(), errno);
  read_back();
}

void SequentialFile::hand_over_filled() {
  if (filled_ == 0) return;
  if (before_) before_(filled_);
  hand_over({.move = Move::write, .buffer = std::move(filling_), .at = handed_over_, .bytes = filled_});
  handed_over_ += std::exchange(filled_, 0);
}

void SequentialFile::hand_over(Piece piece) {
  {
    std::lock_guard lock(mutex_);
    waiting_.push_back(std::move(piece));
  }
  changed_.notify_all();
}

io::Buffer SequentialFile::free_buffer() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !free_.empty() || error_; });
  if (error_) std::rethrow_exception(error_);
  io::Buffer buffer = std::move(free_.back());
  free_.pop_back();
  return buffer;
}

void SequentialFile::wait_until_moved() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return waiting_.empty() && under_way_ == 0; });
  if (error_) std::rethrow_exception(error_);
}

void SequentialFile::move_pieces() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return ended_ || (!waiting_.empty() && (together_ || under_way_ == 0)); });
    if (ended_) return;
    Piece piece = std::move(waiting_.front());
    waiting_.pop_front();
    ++under_way_;
    const bool direct = direct_, given_up = error_ != nullptr;
    lock.unlock();
    bool done = true;
    std::exception_ptr error;
    try {
      if (!given_up) done = moved(piece, direct);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    --under_way_;
    if (error && !error_) error_ = error;
    if (done) {
      free_.push_back(std::move(piece.buffer));
    } else {
      direct_ = together_ = false;
      waiting_.push_front(std::move(piece));
    }
    changed_.notify_all();
  }
}

// False: the file system moves no such blocks after all; the piece has to go through the page cache.
bool SequentialFile::moved(const Piece& piece, bool direct) {
  if (piece.move == Move::write) return write_piece(piece, direct);
  check_piece(piece, direct);
  return true;
}

bool SequentialFile::write_piece(const Piece& piece, bool direct) {
  const std::span<const std::byte> bytes = piece.content();
  hashes_[piece.at / piece_bytes] = io::content_hash(bytes);
  const std::size_t blocks = direct ? bytes.size() / alignment * alignment : 0;
  const io::Moved moved = io::write_all(direct_file_.fd(), piece.at, bytes.first(blocks));
  if (moved.error_number == EINVAL) return false;
  if (moved.error_number != 0) fail_system("write", path_.string(), moved.error_number);
  write_exactly(file_, path_, bytes.subspan(blocks), piece.at + blocks);
  if (!direct) push_out(piece.at + bytes.size());
  return true;
}

void SequentialFile::check_piece(const Piece& piece, bool direct) {
  const std::span<std::byte> into = piece.content();
  std::size_t bytes = 0;
  if (direct) {
    const std::size_t blocks = (into.size() + alignment - 1) / alignment * alignment;
    const ssize_t moved = pread(direct_file_.fd(), into.data(), blocks, static_cast<off_t>(piece.at));
    bytes = moved < 0 ? 0 : std::min(into.size(), static_cast<std::size_t>(moved));
  }
  // Of a file system that moves no such blocks, or of an error, which comes again.
  if (bytes < into.size()) read_exactly(file_, path_, piece.at + bytes, into.subspan(bytes));
  if (io::content_hash(into) == hashes_[piece.at / piece_bytes]) return;
  throw Exception({.kind = io::ErrorKind::corruption,
                   .operation = "read back",
                   .path = path_.string(),
                   .offset = piece.at,
                   .length = into.size(),
                   .detail = "the drive gives other bytes than were written: check the drive and the memory, or "
                             "write to another drive"});
}

void SequentialFile::read_back() {
  // Pages that are left would be compared with themselves.
  posix_fadvise(file_.fd(), 0, 0, POSIX_FADV_DONTNEED);
  {
    std::lock_guard lock(mutex_);
    open(O_RDONLY);
    together_ = true;
  }
  for (std::uint64_t at = 0; at < bytes_; at += piece_bytes) {
    const std::size_t bytes = std::min<std::uint64_t>(piece_bytes, bytes_ - at);
    if (before_) before_(bytes);
    hand_over({.move = Move::check, .buffer = free_buffer(), .at = at, .bytes = bytes});
  }
  wait_until_moved();
  posix_fadvise(file_.fd(), 0, 0, POSIX_FADV_DONTNEED);
}

void SequentialFile::push_out(std::uint64_t written) {
  if (written < pushed_ + 2 * window) return;
  // Waits for the window before the newest one, which is on its way to the drive.
  sync(pushed_ + window, SYNC_FILE_RANGE_WRITE);
  sync(pushed_, SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
  posix_fadvise(file_.fd(), static_cast<off_t>(pushed_), static_cast<off_t>(window), POSIX_FADV_DONTNEED);
  pushed_ += window;
}

// A write that failed on its way to the drive is reported once, to whoever waits for it first: fsync() may be too late.
void SequentialFile::sync(std::uint64_t begin, unsigned how) {
  if (sync_file_range(file_.fd(), static_cast<off64_t>(begin), static_cast<off64_t>(window), how) == 0) return;
  const int error = errno;
  if (error != ENOSYS && error != EINVAL && error != ESPIPE && error != EOPNOTSUPP)
    fail_system("flush", path_.string(), error);
}

}  // namespace tierflow

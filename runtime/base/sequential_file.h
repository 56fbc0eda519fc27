#pragma once
// A new file that is written once, from its beginning to its end.
#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <filesystem>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "io/buffer.h"
#include "runtime/base/files.h"
#include "runtime/base/progress.h"

namespace tierflow {

// Threads write several pieces at a time while the caller fills the next. If the file system allows it, the room is
// reserved at the beginning and the page cache is bypassed. If not, one piece is written after the other, and pages
// that are on the drive are dropped from the page cache. At the end the file is read from the drive and compared with
// what was written. Takes 16 MiB of memory.
class SequentialFile {
 public:
  // Creates the file, or empties an existing one; a symbolic link is refused. Exactly `bytes` have to be written.
  SequentialFile(std::filesystem::path path, std::uint64_t bytes);
  // What was written so far is in the file, which may have its whole length already.
  ~SequentialFile();
  SequentialFile(const SequentialFile&) = delete;
  SequentialFile& operator=(const SequentialFile&) = delete;

  void before_each_move(BeforeMove before) { before_ = std::move(before); }
  // Copies the bytes. An error of an earlier piece is thrown here or by finish(), and by every call after that.
  void write(std::span<const std::byte> bytes);
  // When this returns, all bytes are on the drive and were read back as they were written. Throws Exception (kind
  // corruption) with the place if other bytes came back. Call it once, as the last call.
  void finish();

 private:
  static constexpr std::size_t lanes = 3;  // of the drive; one piece more is filled meanwhile

  enum class Move { write, check };
  struct Piece {
    Move move = Move::write;
    io::Buffer buffer;
    std::uint64_t at = 0;
    std::size_t bytes = 0;

    std::span<std::byte> content() const { return buffer.bytes().first(bytes); }
  };

  void open(int flags);
  void reserve_room();
  void end_lanes();
  void move_pieces();
  bool moved(const Piece& piece, bool direct);
  bool write_piece(const Piece& piece, bool direct);
  void check_piece(const Piece& piece, bool direct);
  io::Buffer free_buffer();
  void hand_over(Piece piece);
  void hand_over_filled();
  void wait_until_moved();
  void push_out(std::uint64_t written);
  void sync(std::uint64_t begin, unsigned how);
  void read_back();

  const std::filesystem::path path_;
  const std::uint64_t bytes_;
  BeforeMove before_;
  File file_, direct_file_;  // direct_file_: with O_DIRECT, where that is allowed
  io::Buffer filling_;
  std::size_t filled_ = 0;
  std::uint64_t handed_over_ = 0;
  std::uint64_t pushed_ = 0;           // of the one lane that writes through the page cache
  std::vector<std::uint64_t> hashes_;  // of each piece; of the lane that has the piece

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  bool direct_ = false;
  bool together_ = false;  // several lanes at a time
  bool ended_ = false;
  std::vector<io::Buffer> free_;
  std::deque<Piece> waiting_;
  std::size_t under_way_ = 0;
  std::exception_ptr error_;
  std::array<std::thread, lanes> threads_;
};

}  // namespace tierflow

#pragma once
// A new file that is written once, from its beginning to its end.
#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/base/files.h"
#include "runtime/base/progress.h"

namespace tierflow {

// A thread writes one piece while the caller fills the next. If the file system allows it, the page cache is bypassed;
// if not, pages that are on the drive are dropped from it. At the end the file is read from the drive and compared with
// what was written. Takes 8 MiB of memory.
class SequentialFile {
 public:
  // Creates the file, or empties an existing one; a symbolic link is refused.
  explicit SequentialFile(std::filesystem::path path);
  // The file keeps what was written so far.
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
  struct Free {
    void operator()(std::byte* bytes) const { std::free(bytes); }
  };

  void hand_over();
  void wait_until_written(std::unique_lock<std::mutex>& lock);
  void write_pieces();
  void write_piece(std::span<const std::byte> piece);
  void push_out();
  void sync(std::uint64_t begin, unsigned how);
  void read_back();

  const std::filesystem::path path_;
  BeforeMove before_;
  File file_;
  bool direct_ = false;  // of the writing thread, like the next two
  std::uint64_t written_ = 0, pushed_ = 0;
  std::array<std::unique_ptr<std::byte, Free>, 2> pieces_;
  std::size_t filling_ = 0, filled_ = 0;
  std::vector<std::uint64_t> hashes_;  // of each piece

  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t handed_over_ = 0;  // bytes of the piece that is not being filled, to be written
  bool ended_ = false;
  std::exception_ptr error_;
  std::thread thread_;
};

}  // namespace tierflow

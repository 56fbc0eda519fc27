#pragma once
// One contract for every way to reach the kernel. A Transfer that owns its memory goes in. It comes back in exactly one
// Outcome, when every byte was moved or when it is certain that not every byte can be.
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "io/backend.h"

namespace tierflow::io {

struct EngineFile {
  int descriptor = -1;
  std::string path;  // for error messages
};

struct Transfer {
  Action action = Action::read;
  std::uint32_t file = 0;
  std::uint64_t offset = 0;
  std::span<std::byte> bytes;   // empty for a flush
  std::shared_ptr<void> owner;  // keeps the bytes alive and unavailable to others until the Outcome
  std::uint64_t tag = 0;        // the caller's
};

struct Outcome {
  Transfer transfer;
  Error error;
  std::chrono::nanoseconds elapsed{0};
  std::uint32_t retries = 0;        // resubmissions after a short transfer, EAGAIN or a failed read
  std::uint32_t read_failures = 0;  // of these, reads that the drive had failed
};

// One thread makes every call, wake() excepted.
class Engine {
 public:
  using Clock = std::chrono::steady_clock;

  // `alignment`: offsets, lengths and addresses must be multiples of it; a short transfer is continued at a multiple of
  // it.
  Engine(std::unique_ptr<Backend> backend, std::vector<EngineFile> files, unsigned depth, std::size_t alignment);
  ~Engine();  // waits for everything in flight, without limit
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  EngineKind kind() const { return backend_->kind(); }
  bool registered_files() const { return backend_->registered_files(); }

  Error start();  // registers the files; once, before the first submit
  Error register_memory(std::span<const std::span<std::byte>> regions) { return backend_->register_memory(regions); }

  // False if `depth` transfers are in flight; `transfer` is then untouched. Wait, and try again.
  bool submit(Transfer& transfer);

  // Appends outcomes. Submissions are batched: they reach the kernel here at the latest. With timeout 0 it returns at
  // once. Otherwise it returns after an outcome, a wake() or the timeout (negative: there is none). It may also return
  // earlier with nothing: call it in a loop.
  void wait(std::vector<Outcome>& outcomes, std::chrono::nanoseconds timeout);
  void poll(std::vector<Outcome>& outcomes) { wait(outcomes, std::chrono::nanoseconds{0}); }
  void wake() { backend_->wake(); }

  unsigned in_flight() const { return in_flight_; }
  // The transfer that has waited longest, and since when; null if nothing is in flight. Costs O(depth).
  const Transfer* oldest(Clock::time_point& since) const;
  void for_each_in_flight(const std::function<void(const Transfer&)>& visit) const;

 private:
  struct Slot {
    Transfer transfer;
    std::size_t done = 0;
    Clock::time_point started;
    std::uint32_t retries = 0;
    std::uint8_t again = 0;     // EAGAIN and its kin since the last progress
    std::uint8_t failures = 0;  // reads that failed at the drive
    std::uint8_t stalls = 0;    // transfers that moved less than one block
    bool busy = false;
  };

  void settle(const KernelResult& result, std::vector<Outcome>& outcomes);
  void push(std::uint32_t index);
  void finish(std::uint32_t index, Error error, std::vector<Outcome>& outcomes);
  Error failure(const Slot& slot, ErrorKind kind, int error_number, std::string detail) const;

  std::unique_ptr<Backend> backend_;
  std::vector<EngineFile> files_;
  std::size_t alignment_;
  std::vector<Slot> slots_;
  std::vector<std::uint32_t> free_;
  std::vector<std::uint32_t> waiting_;  // accepted, but the backend had no room
  std::vector<KernelResult> results_;
  unsigned in_flight_ = 0;
};

}  // namespace tierflow::io

#pragma once
// The Volume over open, checked, locked data files. One thread of its own drives the engine and runs every callback.
#include <array>
#include <deque>
#include <future>
#include <memory>
#include <mutex>
#include <thread>
#include <variant>
#include <vector>

#include "io/engine.h"
#include "io/file.h"
#include "io/layout.h"
#include "io/meter.h"
#include "io/volume.h"

namespace tierflow::io {

struct Member {
  File file;
  std::filesystem::path directory;
  std::uint64_t data_start = 0;
  std::uint64_t file_bytes = 0;
};

class VolumeCore final : public Volume {
 public:
  // `members` in the order of the layout; `made`: folders that exist because of this volume, outer ones first. start()
  // must succeed before anything else is called. writes: the files are new, and each engine is tried with a write;
  // else nothing is written before the first write is submitted.
  VolumeCore(std::vector<Member> members, Layout layout, const VolumeOptions& options,
             std::vector<std::string> warnings, std::vector<std::filesystem::path> made);
  ~VolumeCore() override;

  Error start(bool writes);

  void register_memory(std::span<const std::span<std::byte>> pieces) override;
  void submit(Request request, Callback done) override;
  Error flush() override;
  void remove_files() override;
  std::uint64_t size() const override { return layout_.bytes(); }
  std::size_t alignment() const override { return alignment_; }
  std::vector<double> speeds() const override { return {layout_.weights().begin(), layout_.weights().end()}; }
  VolumeMode mode() const override;
  std::vector<DriveStats> stats() const override;

 private:
  using Clock = Engine::Clock;

  // One request of the caller, cut in pieces. Each piece at the engine shares it, so its buffer cannot be freed before
  // the last of them is back.
  struct Pending {
    Request request;
    Callback done;
    Error error;                  // the first
    std::uint64_t queued = 0;     // pieces not yet at the engine
    std::uint64_t in_flight = 0;  // pieces at the engine
    bool answered = false;
  };
  struct QueuedPiece {
    std::shared_ptr<Pending> owner;
    std::uint64_t file_offset = 0;
    std::span<std::byte> bytes;
  };
  struct FlushCall {
    std::promise<Error> result;
    Error error;
    std::size_t left = 0;  // drives that have not answered
  };
  struct RegisterCall {
    std::vector<std::span<std::byte>> pieces;
    std::promise<void> result;
  };
  struct Drive {
    std::deque<QueuedPiece> queue;
    std::deque<std::shared_ptr<FlushCall>> flushes;
    unsigned in_flight = 0;
    bool flushing = false;
  };
  using Posted = std::variant<std::shared_ptr<Pending>, std::shared_ptr<FlushCall>, std::shared_ptr<RegisterCall>>;

  void post(Posted item);

  // On the volume's thread:
  void run(std::promise<Error>& started, bool writes);
  Error start_engine(bool writes);
  void accept(Posted& item);
  void accept(const std::shared_ptr<Pending>& pending);
  void accept(const std::shared_ptr<FlushCall>& call);
  void accept(const std::shared_ptr<RegisterCall>& call);
  Error check(const Request& request) const;
  void pump();
  void pump(std::uint32_t index);
  void settle(Outcome& outcome);
  void settle_flush(Outcome& outcome);
  void answer(Pending& pending);
  void answer_flush(FlushCall& call);  // of one drive
  std::chrono::nanoseconds watch_interval() const;
  // A wait far beyond watch_interval() means that this process was suspended: the time of what is in flight then counts
  // from the end of that wait.
  void note_absence(std::chrono::nanoseconds waited);
  void watch_for_stalls();
  void give_up(const Transfer& stuck, std::chrono::seconds waited);
  void notify(Notice::Kind kind, std::string text);
  bool idle() const;

  std::vector<Member> members_;
  const std::vector<std::filesystem::path> made_;
  Layout layout_;
  VolumeOptions options_;
  std::size_t alignment_;
  std::thread thread_;

  // Of the volume's thread alone, once it runs.
  std::unique_ptr<Engine> engine_;
  std::vector<Drive> drives_;
  std::vector<std::span<std::byte>> regions_;
  Clock::time_point returned_{};  // the end of the last absence
  Error failed_;                  // a stall ended the volume
  Error flush_failed_;            // flushes cannot be trusted any more
  Clock::time_point warned_{};
  bool limit_noticed_ = false;
  std::uint64_t written_ = 0;

  mutable std::mutex inbox_mutex_;  // guards the next three
  std::vector<Posted> inbox_;
  bool asleep_ = false;
  bool stopping_ = false;

  mutable std::mutex report_mutex_;  // guards the next two
  VolumeMode mode_;
  std::vector<Meter> meters_;
};

}  // namespace tierflow::io

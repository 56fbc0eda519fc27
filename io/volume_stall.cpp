// A drive that does not answer: first a notice, then, at the limit, every caller gets an error and the memory that the
// drive may still write to is kept.
#include <algorithm>
#include <cerrno>

#include "io/volume_core.h"

namespace tierflow::io {
namespace {

constexpr const char* kRemedy =
    "; where the kernel's log (dmesg) tells of errors or resets, name a folder on another drive with --storage; where "
    "it is silent, try --engine threads";

std::string seconds_of(std::chrono::nanoseconds time) {
  return std::to_string(std::chrono::duration_cast<std::chrono::seconds>(time).count()) + " s";
}

}  // namespace

std::chrono::nanoseconds VolumeCore::watch_interval() const {
  std::chrono::milliseconds interval{1000};
  for (std::chrono::milliseconds limit : {options_.stall_warning, options_.stall_limit}) {
    if (limit.count() > 0) interval = std::min(interval, limit / 4);
  }
  return std::max(interval, std::chrono::milliseconds{5});
}

void VolumeCore::note_absence(std::chrono::nanoseconds waited) {
  constexpr int kIntervals = 4;
  if (waited > kIntervals * watch_interval()) returned_ = Clock::now();
}

void VolumeCore::watch_for_stalls() {
  Clock::time_point since;
  const Transfer* stuck = engine_->oldest(since);
  if (stuck == nullptr) return;
  const auto waited = Clock::now() - std::max(since, returned_);
  if (options_.stall_limit.count() > 0 && waited >= options_.stall_limit && !failed_) {
    return give_up(*stuck, std::chrono::duration_cast<std::chrono::seconds>(waited));
  }
  if (options_.stall_warning.count() > 0 && waited >= options_.stall_warning && warned_ != since) {
    warned_ = since;
    notify(Notice::Kind::stalled,
           members_[stuck->file].file.path() + " has not answered a request for " + seconds_of(waited) +
               (options_.stall_limit.count() > 0 ? "; the run ends at " + seconds_of(options_.stall_limit) : "") +
               kRemedy);
  }
}

void VolumeCore::give_up(const Transfer& stuck, std::chrono::seconds waited) {
  failed_ = Error{.kind = ErrorKind::io,
                  .operation = stuck.action == Action::read    ? "read"
                               : stuck.action == Action::write ? "write"
                                                               : "flush",
                  .path = members_[stuck.file].file.path(),
                  .offset = stuck.offset,
                  .length = stuck.bytes.size(),
                  .error_number = ETIMEDOUT,
                  .detail = "the drive has not answered for " + seconds_of(waited) + kRemedy};
  std::vector<std::shared_ptr<void>> flying;
  std::vector<std::shared_ptr<FlushCall>> flushes;
  engine_->for_each_in_flight([&](const Transfer& transfer) {
    if (transfer.action == Action::flush) {
      flushes.push_back(std::static_pointer_cast<FlushCall>(transfer.owner));
    } else {
      flying.push_back(transfer.owner);
    }
  });
  for (Drive& drive : drives_) {
    flushes.insert(flushes.end(), drive.flushes.begin(), drive.flushes.end());
    drive.flushes.clear();
    std::deque<QueuedPiece> queue = std::move(drive.queue);
    drive.queue.clear();
    for (QueuedPiece& piece : queue) {
      --piece.owner->queued;
      if (!piece.owner->error) piece.owner->error = failed_;
      if (piece.owner->queued == 0) answer(*piece.owner);
    }
  }
  for (const std::shared_ptr<void>& owner : flying) {
    auto pending = std::static_pointer_cast<Pending>(owner);
    if (!pending->error) pending->error = failed_;
    answer(*pending);
  }
  for (const std::shared_ptr<FlushCall>& call : flushes) {
    if (call->left == 0) continue;
    call->left = 0;
    call->error = failed_;
    call->result.set_value(failed_);
  }
}

}  // namespace tierflow::io

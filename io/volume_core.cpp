#include "io/volume_core.h"

#include <algorithm>
#include <cerrno>

#include "io/filesystem.h"
#include "io/member.h"
#include "io/probe.h"
#include "io/thread.h"

namespace tierflow::io {
namespace {

constexpr std::size_t kLargestRegion = std::size_t{1} << 30;

}  // namespace

VolumeCore::VolumeCore(std::vector<Member> members, Layout layout, const VolumeOptions& options,
                       std::vector<std::string> warnings, std::vector<std::filesystem::path> made)
    : members_(std::move(members)),
      made_(std::move(made)),
      layout_(std::move(layout)),
      options_(options),
      alignment_(4096),
      drives_(members_.size()) {
  mode_.direct = true;
  mode_.warnings = std::move(warnings);
  for (const Member& member : members_) {
    alignment_ = std::max(alignment_, member.file.alignment());
    if (!member.file.direct()) mode_.direct = false;
    meters_.emplace_back(member.directory);
  }
  mode_.alignment = alignment_;
}

VolumeCore::~VolumeCore() {
  {
    std::lock_guard lock(inbox_mutex_);
    stopping_ = true;
  }
  if (engine_) engine_->wake();
  if (thread_.joinable()) thread_.join();
  if (engine_ && engine_->in_flight() != 0) {
    // The drive has not answered within the limit. It may do so at any time: engine, buffers and files stay for ever.
    (void)engine_.release();
    new std::vector<Member>(std::move(members_));
  }
}

Error VolumeCore::start(bool writes) {
  std::promise<Error> started;
  std::future<Error> result = started.get_future();
  if (Error error = start_thread(thread_, "tierflow-vol", [&, this] { run(started, writes); })) return error;
  Error error = result.get();
  if (error) thread_.join();
  return error;
}

Error VolumeCore::start_engine(bool writes) {
  std::vector<EngineFile> files;
  for (const Member& member : members_) files.push_back({member.file.descriptor(), member.file.path()});
  ProbeOptions options;
  options.wanted = options_.engine;
  // One more a drive, so that a flush finds room beside a full queue.
  options.depth = (options_.depth + 1) * static_cast<unsigned>(members_.size());
  options.alignment = alignment_;
  options.direct = mode_.direct;
  options.read_only = !writes;
  options.scratch_offset = kScratchStart;
  if (options_.stall_limit.count() > 0) {
    options.limit =
        std::max(std::chrono::seconds{1}, std::chrono::duration_cast<std::chrono::seconds>(options_.stall_limit));
  }
  options.wrap_backend = options_.wrap_backend;
  Result<Probed> probed = probe_engine(files, options);
  if (!probed) return probed.error();
  engine_ = std::move(probed->engine);
  std::lock_guard lock(report_mutex_);
  mode_.engine = engine_->kind();
  mode_.registered_files = engine_->registered_files();
  mode_.warnings.insert(mode_.warnings.end(), probed->warnings.begin(), probed->warnings.end());
  for (const Member& member : members_) {
    const std::vector<std::string>& lacks = member.file.warnings();
    mode_.warnings.insert(mode_.warnings.end(), lacks.begin(), lacks.end());
    if (member.file.direct()) continue;
    mode_.warnings.push_back(
        member.directory.string() +
        " refuses O_DIRECT: its bytes go through the page cache, which costs memory and time; name a folder on ext4 "
        "or xfs with --storage");
  }
  return {};
}

void VolumeCore::run(std::promise<Error>& started, bool writes) {
  Error error = start_engine(writes);
  const bool works = !error;
  started.set_value(std::move(error));
  if (!works) return;

  std::vector<Posted> items;
  std::vector<Outcome> outcomes;
  for (;;) {
    bool stop;
    items.clear();
    {
      std::lock_guard lock(inbox_mutex_);
      items.swap(inbox_);
      stop = stopping_;
    }
    for (Posted& item : items) accept(item);
    pump();
    if (stop && idle()) {
      std::lock_guard lock(inbox_mutex_);
      if (inbox_.empty()) return;  // callbacks may have posted more
    }
    const bool busy = engine_->in_flight() != 0;
    std::chrono::nanoseconds timeout{-1};
    if (busy) timeout = watch_interval();
    {
      std::lock_guard lock(inbox_mutex_);
      if (!inbox_.empty() || (stop && !busy)) {
        timeout = std::chrono::nanoseconds{0};
      } else {
        asleep_ = true;
      }
    }
    outcomes.clear();
    const Clock::time_point before = Clock::now();
    engine_->wait(outcomes, timeout);
    if (busy) note_absence(Clock::now() - before);
    {
      std::lock_guard lock(inbox_mutex_);
      asleep_ = false;
    }
    for (Outcome& outcome : outcomes) settle(outcome);
    outcomes.clear();
    if (engine_->in_flight() != 0) watch_for_stalls();
  }
}

bool VolumeCore::idle() const {
  for (const Drive& drive : drives_) {
    if (!drive.queue.empty() || !drive.flushes.empty()) return false;
  }
  return failed_ ? true : engine_->in_flight() == 0;
}

void VolumeCore::post(Posted item) {
  bool wake;
  {
    std::lock_guard lock(inbox_mutex_);
    inbox_.push_back(std::move(item));
    wake = std::exchange(asleep_, false);
  }
  if (wake) engine_->wake();
}

void VolumeCore::accept(Posted& item) {
  std::visit([this](auto& content) { accept(content); }, item);
}

Error VolumeCore::check(const Request& request) const {
  Error error{.kind = ErrorKind::usage,
              .operation = request.op == Op::read ? "read" : "write",
              .path = members_.front().file.path(),
              .offset = request.offset,
              .length = request.length};
  if (request.length > request.buffer.size()) {
    error.detail = "the buffer is smaller than the request";
  } else if (request.offset > layout_.bytes() || request.length > layout_.bytes() - request.offset) {
    error.detail = "the request reaches beyond the volume's " + std::to_string(layout_.bytes()) + " bytes";
  } else if (request.offset % alignment_ != 0 || request.length % alignment_ != 0 ||
             reinterpret_cast<std::uintptr_t>(request.buffer.data()) % alignment_ != 0) {
    error.detail = "offset, length and address must be multiples of " + std::to_string(alignment_);
  } else {
    return {};
  }
  return error;
}

void VolumeCore::accept(const std::shared_ptr<Pending>& pending) {
  pending->error = failed_ ? failed_ : check(pending->request);
  if (!pending->error) {
    const Request& request = pending->request;
    layout_.split(request.offset, request.length, options_.block, [&](const Piece& piece) {
      const std::uint64_t begin = piece.volume_offset - request.offset;
      drives_[piece.member].queue.push_back({.owner = pending,
                                             .file_offset = members_[piece.member].data_start + piece.member_offset,
                                             .bytes = request.buffer.bytes().subspan(begin, piece.length)});
      ++pending->queued;
    });
  }
  if (pending->queued == 0) answer(*pending);
}

void VolumeCore::accept(const std::shared_ptr<FlushCall>& call) {
  call->error = failed_ ? failed_ : flush_failed_;
  if (call->error) return call->result.set_value(call->error);
  call->left = drives_.size();
  for (Drive& drive : drives_) drive.flushes.push_back(call);
}

void VolumeCore::accept(const std::shared_ptr<RegisterCall>& call) {
  // In regions of at most 1 GiB, the kernel's limit. What lies across two of them goes unregistered.
  for (const std::span<std::byte> piece : call->pieces) {
    for (std::size_t begin = 0; begin < piece.size(); begin += kLargestRegion) {
      regions_.push_back(piece.subspan(begin, std::min(kLargestRegion, piece.size() - begin)));
    }
  }
  Error error = engine_->register_memory(regions_);
  {
    std::lock_guard lock(report_mutex_);
    mode_.registered_buffers = !error && !regions_.empty();
    if (error && engine_->kind() == EngineKind::io_uring) {
      std::size_t bytes = 0;
      for (std::span<std::byte> region : regions_) bytes += region.size();
      mode_.warnings.push_back(
          "buffers are not registered with the kernel (" + error.message() +
          "): every request pins its memory anew; raise the locked memory limit (ulimit -l) to at least " +
          std::to_string((bytes >> 10) + 1024) + " KiB");
    }
  }
  if (error) regions_.clear();
  call->result.set_value();
}

void VolumeCore::pump() {
  for (std::uint32_t index = 0; index < drives_.size(); ++index) pump(index);
}

void VolumeCore::pump(std::uint32_t index) {
  Drive& drive = drives_[index];
  if (!drive.flushing && !drive.flushes.empty()) {
    Transfer transfer{.action = Action::flush, .file = index, .owner = drive.flushes.front()};
    if (engine_->submit(transfer)) {
      drive.flushing = true;
      drive.flushes.pop_front();
    }
  }
  while (!drive.queue.empty() && drive.in_flight < options_.depth) {
    QueuedPiece& piece = drive.queue.front();
    Pending& pending = *piece.owner;
    if (pending.error) {  // no use in going on with a request that has failed
      --pending.queued;
      if (pending.queued == 0 && pending.in_flight == 0) answer(pending);
      drive.queue.pop_front();
      continue;
    }
    Transfer transfer{.action = pending.request.op == Op::read ? Action::read : Action::write,
                      .file = index,
                      .offset = piece.file_offset,
                      .bytes = piece.bytes,
                      .owner = piece.owner};
    if (!engine_->submit(transfer)) return;
    --pending.queued;
    ++pending.in_flight;
    ++drive.in_flight;
    std::lock_guard lock(report_mutex_);
    meters_[index].start();
    drive.queue.pop_front();
  }
}

void VolumeCore::settle(Outcome& outcome) {
  const Transfer& transfer = outcome.transfer;
  {
    std::lock_guard lock(report_mutex_);
    meters_[transfer.file].end(outcome);
  }
  if (transfer.action == Action::flush) return settle_flush(outcome);
  --drives_[transfer.file].in_flight;
  if (!outcome.error && transfer.action == Action::write) {
    written_ += transfer.bytes.size();
    if (options_.write_limit != 0 && written_ >= options_.write_limit && !std::exchange(limit_noticed_, true)) {
      notify(Notice::Kind::write_limit,
             std::to_string(written_) + " bytes written, the limit is " + std::to_string(options_.write_limit));
    }
  }
  if (!outcome.error && outcome.read_failures != 0) {
    notify(Notice::Kind::retried, members_[transfer.file].file.path() + ": a read at offset " +
                                      std::to_string(transfer.offset) + " failed and succeeded when tried again");
  }
  const std::shared_ptr<Pending> pending = std::static_pointer_cast<Pending>(transfer.owner);
  outcome.transfer.owner.reset();
  --pending->in_flight;
  if (outcome.error && !pending->error) pending->error = std::move(outcome.error);
  if (pending->queued == 0 && pending->in_flight == 0) answer(*pending);
}

void VolumeCore::answer(Pending& pending) {
  if (std::exchange(pending.answered, true)) return;
  Callback done = std::move(pending.done);
  Completion completion{.error = pending.error};
  if (pending.in_flight == 0) completion.buffer = std::move(pending.request.buffer);
  if (done) done(std::move(completion));
}

void VolumeCore::settle_flush(Outcome& outcome) {
  drives_[outcome.transfer.file].flushing = false;
  FlushCall& call = *std::static_pointer_cast<FlushCall>(outcome.transfer.owner);
  if (call.left == 0) return;  // answered when the volume gave up
  if (outcome.error && !flush_failed_) {
    flush_failed_ = outcome.error;
    flush_failed_.detail =
        "what was written since the last good flush must be considered lost; no later flush is attempted" +
        (flush_failed_.detail.empty() ? "" : "; " + flush_failed_.detail);
    // The kernel forgets a failed flush: the next one would succeed without the lost data. So there is no next one, nor
    // one of those that wait here.
    for (Drive& drive : drives_) {
      for (const std::shared_ptr<FlushCall>& waiting : std::exchange(drive.flushes, {})) answer_flush(*waiting);
    }
  }
  answer_flush(call);
}

void VolumeCore::answer_flush(FlushCall& call) {
  if (!call.error) call.error = flush_failed_;
  if (--call.left == 0) call.result.set_value(call.error);
}

void VolumeCore::notify(Notice::Kind kind, std::string text) {
  if (options_.on_notice) options_.on_notice(Notice{kind, std::move(text)});
}

void VolumeCore::register_memory(std::span<const std::span<std::byte>> pieces) {
  if (pieces.empty() || std::this_thread::get_id() == thread_.get_id()) return;
  auto call = std::make_shared<RegisterCall>();
  call->pieces.assign(pieces.begin(), pieces.end());
  std::future<void> done = call->result.get_future();
  post(call);
  done.wait();
}

void VolumeCore::submit(Request request, Callback done) {
  auto pending = std::make_shared<Pending>();
  pending->request = std::move(request);
  pending->done = std::move(done);
  post(std::move(pending));
}

Error VolumeCore::flush() {
  if (std::this_thread::get_id() == thread_.get_id()) {
    return Error{.kind = ErrorKind::usage, .operation = "flush", .detail = "a callback must not wait for a flush"};
  }
  auto call = std::make_shared<FlushCall>();
  std::future<Error> result = call->result.get_future();
  post(call);
  if (Error error = result.get()) return error;
  for (const Member& member : members_) {
    if (Error error = member.file.check_in_place(member.file_bytes)) return error;
  }
  return {};
}

void VolumeCore::remove_files() {
  for (const Member& member : members_) {
    member.file.remove();
    (void)sync_directory(member.directory);
  }
  std::error_code in_use;
  for (auto it = made_.rbegin(); it != made_.rend(); ++it) std::filesystem::remove(*it, in_use);
}

VolumeMode VolumeCore::mode() const {
  std::lock_guard lock(report_mutex_);
  return mode_;
}

std::vector<DriveStats> VolumeCore::stats() const {
  std::lock_guard lock(report_mutex_);
  std::vector<DriveStats> result;
  for (const Meter& meter : meters_) result.push_back(meter.stats());
  return result;
}

}  // namespace tierflow::io

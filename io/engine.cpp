#include "io/engine.h"

#include <cerrno>
#include <thread>

namespace tierflow::io {
namespace {

constexpr int kReadAttempts = 3;
constexpr int kAgainAttempts = 16;
constexpr int kPatientAfter = 4;
constexpr int kIdleTransfers = 2;

const char* action_name(Action action) {
  switch (action) {
    case Action::read:
      return "read";
    case Action::write:
      return "write";
    case Action::flush:
      return "flush";
  }
  return "?";
}

}  // namespace

const char* engine_name(EngineKind kind) {
  switch (kind) {
    case EngineKind::automatic:
      return "automatic";
    case EngineKind::io_uring:
      return "io_uring";
    case EngineKind::libaio:
      return "libaio";
    case EngineKind::threads:
      return "threads";
  }
  return "?";
}

Engine::Engine(std::unique_ptr<Backend> backend, std::vector<EngineFile> files, unsigned depth, std::size_t alignment)
    : backend_(std::move(backend)), files_(std::move(files)), alignment_(alignment), slots_(depth) {
  free_.reserve(depth);
  for (std::uint32_t i = depth; i > 0; --i) free_.push_back(i - 1);
}

Engine::~Engine() {
  std::vector<Outcome> outcomes;
  while (in_flight_ != 0) {
    wait(outcomes, std::chrono::nanoseconds{-1});
    outcomes.clear();
  }
}

Error Engine::start() {
  std::vector<int> descriptors;
  for (const EngineFile& file : files_) descriptors.push_back(file.descriptor);
  return backend_->register_files(descriptors);
}

bool Engine::submit(Transfer& transfer) {
  if (free_.empty()) return false;
  const std::uint32_t index = free_.back();
  free_.pop_back();
  Slot& slot = slots_[index];
  slot = Slot{};
  slot.transfer = std::move(transfer);
  slot.started = Clock::now();
  slot.busy = true;
  ++in_flight_;
  push(index);
  return true;
}

void Engine::push(std::uint32_t index) {
  const Slot& slot = slots_[index];
  const KernelOp op{.action = slot.transfer.action,
                    .patient = slot.again >= kPatientAfter,
                    .file = slot.transfer.file,
                    .ticket = index,
                    .offset = slot.transfer.offset + slot.done,
                    .data = slot.transfer.bytes.data() + slot.done,
                    .length = slot.transfer.bytes.size() - slot.done};
  if (!backend_->push(op)) waiting_.push_back(index);
}

void Engine::wait(std::vector<Outcome>& outcomes, std::chrono::nanoseconds timeout) {
  results_.clear();
  backend_->reap(results_, timeout);
  std::vector<std::uint32_t> again;
  again.swap(waiting_);
  for (std::uint32_t index : again) push(index);
  for (const KernelResult& result : results_) settle(result, outcomes);
}

void Engine::settle(const KernelResult& result, std::vector<Outcome>& outcomes) {
  Slot& slot = slots_[result.ticket];
  const Transfer& transfer = slot.transfer;
  if (result.value < 0) {
    const int number = static_cast<int>(-result.value);
    if (number == EAGAIN || number == EINTR || number == ECANCELED || number == EBUSY) {
      if (slot.again++ < kAgainAttempts) {
        if (slot.again > kPatientAfter) std::this_thread::sleep_for(std::chrono::microseconds{50} * slot.again);
        ++slot.retries;
        return push(result.ticket);
      }
      return finish(result.ticket, failure(slot, ErrorKind::io, number, "the kernel kept asking to try again"),
                    outcomes);
    }
    if (transfer.action == Action::read && ++slot.failures < kReadAttempts && number != EINVAL && number != EBADF) {
      ++slot.retries;
      return push(result.ticket);
    }
    return finish(result.ticket, failure(slot, ErrorKind::io, number, advice(number)), outcomes);
  }
  if (transfer.action == Action::flush) return finish(result.ticket, {}, outcomes);

  const std::size_t left = transfer.bytes.size() - slot.done;
  const std::size_t moved = static_cast<std::size_t>(result.value);
  if (moved > left) {
    return finish(result.ticket, failure(slot, ErrorKind::io, 0, "the kernel reports more bytes than were asked for"),
                  outcomes);
  }
  if (moved == left) return finish(result.ticket, {}, outcomes);

  const std::size_t whole = moved - moved % alignment_;
  slot.done += whole;
  slot.again = 0;
  ++slot.retries;
  if (whole != 0) {
    slot.stalls = 0;
  } else if (++slot.stalls >= kIdleTransfers) {
    if (transfer.action == Action::read) {
      return finish(result.ticket, failure(slot, ErrorKind::corruption, 0, "the file ends inside the data"), outcomes);
    }
    return finish(result.ticket, failure(slot, ErrorKind::io, 0, "the drive takes no more bytes"), outcomes);
  }
  push(result.ticket);
}

void Engine::finish(std::uint32_t index, Error error, std::vector<Outcome>& outcomes) {
  Slot& slot = slots_[index];
  outcomes.push_back(Outcome{.transfer = std::move(slot.transfer),
                             .error = std::move(error),
                             .elapsed = Clock::now() - slot.started,
                             .retries = slot.retries,
                             .read_failures = slot.failures});
  slot = Slot{};
  free_.push_back(index);
  --in_flight_;
}

Error Engine::failure(const Slot& slot, ErrorKind kind, int error_number, std::string detail) const {
  return Error{.kind = kind,
               .operation = action_name(slot.transfer.action),
               .path = files_[slot.transfer.file].path,
               .offset = slot.transfer.offset,
               .length = slot.transfer.bytes.size(),
               .error_number = error_number,
               .detail = std::move(detail)};
}

const Transfer* Engine::oldest(Clock::time_point& since) const {
  const Slot* found = nullptr;
  for (const Slot& slot : slots_) {
    if (slot.busy && (found == nullptr || slot.started < found->started)) found = &slot;
  }
  if (found == nullptr) return nullptr;
  since = found->started;
  return &found->transfer;
}

void Engine::for_each_in_flight(const std::function<void(const Transfer&)>& visit) const {
  for (const Slot& slot : slots_) {
    if (slot.busy) visit(slot.transfer);
  }
}

}  // namespace tierflow::io

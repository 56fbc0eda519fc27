#pragma once
// Negative controls of the commit protocol: what stands between a store and its drive breaks one of the promises that
// the protocol rests on, as wrong code or a wrong drive would. Of stores in one folder.
#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "tests/support/forwarding_backend.h"

namespace tierflow::testing {

enum class Broken : std::uint8_t {
  nothing,
  no_first_flush,        // a superblock may be durable before what it refers to
  superblock_in_copy_a,  // always: there is one
  words_in_place,        // hi words are written over those of the generation before
  errors_hidden,         // a write that failed counts as done
  read_errors_hidden,    // a read that failed brings zeros
  sectors_exchanged,     // two sectors of the state are read in each other's place
};

// Where a store keeps what, in bytes of its volume.
struct StorePlaces {
  std::uint64_t superblock_b = 0;
  std::uint64_t words = 0, word_bytes = 0,
                second_bytes = 0;            // the second slot follows the first, without what is frozen
  std::uint64_t state = 0, other_state = 0;  // of two extents; their first sectors are exchanged
};

class BrokenProtocol final : public ForwardingBackend {
 public:
  BrokenProtocol(std::unique_ptr<io::Backend> inner, Broken what, const StorePlaces& places)
      : ForwardingBackend(std::move(inner)), what_(what), places_(places) {}

  bool push(const io::KernelOp& given) override {
    io::KernelOp op = given;
    const std::uint64_t at = op.offset - kDataArea;  // of the volume; the drive's own header lies before
    const bool write = op.action == io::Action::write, superblock = write && (at == 0 || at == places_.superblock_b);
    if (op.action == io::Action::flush) {
      if (what_ == Broken::no_first_flush && !after_superblock_) return answer(op, 0);
    } else if (what_ == Broken::superblock_in_copy_a && superblock) {
      op.offset = kDataArea;
    } else if (what_ == Broken::words_in_place && at >= places_.words + places_.word_bytes &&
               at < places_.words + places_.word_bytes + places_.second_bytes) {
      op.offset -= places_.word_bytes;
    } else if (what_ == Broken::sectors_exchanged && op.action == io::Action::read &&
               (at == places_.state || at == places_.other_state)) {
      op.offset = kDataArea + (at == places_.state ? places_.other_state : places_.state);
    }
    after_superblock_ = superblock;
    if (what_ == Broken::errors_hidden && write) hidden_[op.ticket] = op.length;
    if (what_ == Broken::read_errors_hidden && op.action == io::Action::read) {
      std::memset(op.data, 0, op.length);
      hidden_[op.ticket] = op.length;
    }
    return ForwardingBackend::push(op);
  }
  void reap(std::vector<io::KernelResult>& results, std::chrono::nanoseconds timeout) override {
    const std::size_t before = results.size();
    ForwardingBackend::reap(results, timeout);
    for (std::size_t i = before; i < results.size(); ++i) {
      const auto hidden = hidden_.find(results[i].ticket);
      if (hidden == hidden_.end()) continue;
      results[i].value = static_cast<std::int64_t>(hidden->second);
      hidden_.erase(hidden);
    }
  }

 private:
  static constexpr std::uint64_t kDataArea = 1 << 20;
  const Broken what_;
  const StorePlaces places_;
  bool after_superblock_ = false;
  std::map<std::uint32_t, std::size_t> hidden_;  // whose error is: by ticket, how long
};

}  // namespace tierflow::testing

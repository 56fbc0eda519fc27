#pragma once
// Reads the bf16 words of a store's committed generation for an export, ahead of their use.
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <span>
#include <vector>

#include "swap/store.h"

namespace tierflow {

// Reads chunks, verified, ahead of their use: `ahead` bytes of them, at least a chunk. The generation stays the newest
// while this lives (swap::CommittedWords). Any thread, one at a time. Throws Exception.
class WordsAhead {
 public:
  WordsAhead(swap::Store& store, const swap::Layout& layout, std::uint64_t ahead);

  // As ReadChunk (streamed_state.h).
  void read(std::span<const int> chunks, const std::function<void(std::span<std::byte>)>& use);

 private:
  void begin(int chunk);

  swap::CommittedWords words_;
  const std::size_t ahead_;       // chunks
  std::vector<io::Buffer> free_;  // with those that are read or used, one more than `ahead_`
  std::deque<std::future<io::Completion>> arriving_;
};

}  // namespace tierflow

#include "runtime/state/words_ahead.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "runtime/base/exception.h"

namespace tierflow {

WordsAhead::WordsAhead(swap::Store& store, const swap::Layout& layout, std::uint64_t ahead)
    : words_(store),
      ahead_(std::clamp<std::size_t>(ahead / std::max<std::uint64_t>(layout.max_word_bytes(), 1), 1, 16)),
      free_(io::allocate_buffers(ahead_ + 1, layout.max_word_bytes())) {
  if (free_.empty())
    throw Exception(
        {.kind = io::ErrorKind::memory, .operation = "export", .length = (ahead_ + 1) * layout.max_word_bytes()});
}

void WordsAhead::read(std::span<const int> chunks, const std::function<void(std::span<std::byte>)>& use) {
  if (arriving_.empty()) begin(chunks.front());
  io::Completion read = arriving_.front().get();
  arriving_.pop_front();
  if (read.error) throw Exception(std::move(read.error));
  while (arriving_.size() < std::min(ahead_, chunks.size() - 1)) begin(chunks[arriving_.size() + 1]);
  const std::span<std::byte> words = read.buffer.bytes().first(words_.bytes(chunks.front()));
  if (const io::Error wrong = words_.verify(chunks.front(), words)) {
    words_.report_second_reading(wrong);
    use(value_or_throw(words_.fetch(chunks.front())).bytes());
  } else {
    use(words);
  }
  free_.push_back(std::move(read.buffer));
}

void WordsAhead::begin(int chunk) {
  io::Buffer buffer = std::move(free_.back());
  free_.pop_back();
  const auto arrived = std::make_shared<std::promise<io::Completion>>();
  arriving_.push_back(arrived->get_future());
  words_.read(chunk, std::move(buffer), [arrived](io::Completion&& read) { arrived->set_value(std::move(read)); });
}

}  // namespace tierflow

#include "runtime/data/data.h"

#include <fmt/format.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "runtime/base/exception.h"
#include "runtime/data/data_source.h"
#include "runtime/data/document_sinks.h"
#include "runtime/data/token_store.h"

namespace tierflow {
namespace {

std::uint64_t mix(std::uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

// A permutation of [0, n) without a table: a Feistel network on the next even number of bits, walked until it lands
// below n.
std::uint64_t permute(std::uint64_t index, std::uint64_t n, std::uint64_t key) {
  if (n < 2) return 0;
  const int half = (std::bit_width(n - 1) + 1) / 2;
  const std::uint64_t mask = (std::uint64_t{1} << half) - 1;
  do {
    std::uint64_t left = index >> half, right = index & mask;
    for (std::uint64_t round = 0; round < 6; ++round) {
      const std::uint64_t next = left ^ (mix(right + key + (round + 1) * 0x9e3779b97f4a7c15u) & mask);
      left = right;
      right = next;
    }
    index = left << half | right;
  } while (index >= n);
  return index;
}

}  // namespace

struct Dataset::Impl {
  DataOptions options;
  TokenStore store;
  std::int64_t sequences = 0, held_out = 0, skipped = 0;
  std::uint64_t fingerprint = 0;

  explicit Impl(const DataOptions& given) : options(given), store(given.cache, given.vocab_size) {}

  // Held-out sequences lie evenly through the data: the k-th is the middle one of the k-th of `held_out` equal parts.
  std::int64_t held_out_position(std::int64_t k) const {
    return static_cast<std::int64_t>((static_cast<__int128>(2 * k + 1) * sequences) / (2 * held_out));
  }

  // The j-th of the sequences that are not held out.
  std::int64_t training_position(std::int64_t j) const {
    std::int64_t low = 0, high = held_out;  // how many held-out ones come before it
    while (low < high) {
      const std::int64_t middle = (low + high) / 2;
      if (held_out_position(middle) - middle <= j) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return j + low;
  }

  void divide(const TokenSink& sink) {
    const std::int64_t length = options.sequence_length;
    const std::string first = options.paths.front().string();
    const bool empty = store.size() == 0 || !sink.content();
    if (empty && sink.skipped() != 0)
      fail_input(first, fmt::format("holds no text: all of its records were passed over, {} of them. The first: {}",
                                    sink.skipped(), sink.first_skipped().message()));
    if (empty) fail_input(first, "holds no text: every file is empty or blank");
    sequences = store.size() / length;
    if (sequences == 0)
      fail_input(
          first,
          fmt::format("holds {} tokens, fewer than one sequence of {}; give more text or a smaller --sequence-length",
                      store.size(), length));
    if (sequences > 1 && options.held_out > 0)
      held_out =
          std::clamp<std::int64_t>(std::llround(options.held_out * static_cast<double>(sequences)), 1, sequences - 1);
    const std::array<std::uint64_t, 6> shape = {store.hash(),
                                                static_cast<std::uint64_t>(store.size()),
                                                static_cast<std::uint64_t>(length),
                                                static_cast<std::uint64_t>(held_out),
                                                static_cast<std::uint64_t>(token_width(options.vocab_size)),
                                                options.seed};
    fingerprint = XXH3_64bits(shape.data(), sizeof shape);
  }

  void read(std::int64_t sequence, std::span<std::int64_t> out) const {
    if (static_cast<std::int64_t>(out.size()) != options.sequence_length)
      fail(io::ErrorKind::usage, "",
           fmt::format("a sequence has {} tokens, not {}", options.sequence_length, out.size()));
    store.read(sequence * options.sequence_length, out);
  }
};

Dataset::Dataset(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Dataset::Dataset(Dataset&&) noexcept = default;
Dataset& Dataset::operator=(Dataset&&) noexcept = default;
Dataset::~Dataset() = default;

Dataset Dataset::prepare(const DataOptions& options) {
  if (options.sequence_length < 2) fail(io::ErrorKind::usage, "", "--sequence-length must be at least 2");
  if (!(options.held_out >= 0 && options.held_out < 1))
    fail(io::ErrorKind::usage, "", "the held-out share must be at least 0 and below 1");
  if (options.vocab_size < 1 || options.vocab_size > INT32_MAX)
    fail(io::ErrorKind::usage, "", "the vocabulary's size must be given");
  const std::vector<Source> sources = list_sources(options.paths);
  auto impl = std::make_unique<Impl>(options);
  const auto sink =
      options.tokenizer.empty() ? make_byte_sink(impl->store) : make_tokenizer_sink(impl->store, impl->options);
  for (const Source& source : sources) read_source(source, impl->options, *sink);
  sink->finish();
  impl->store.seal();
  impl->skipped = sink->skipped();
  impl->divide(*sink);
  return Dataset(std::move(impl));
}

std::int64_t Dataset::training_sequences() const {
  return impl_->sequences - impl_->held_out;
}
std::int64_t Dataset::held_out_sequences() const {
  return impl_->held_out;
}
std::int64_t Dataset::tokens() const {
  return impl_->store.size();
}
std::int64_t Dataset::skipped_records() const {
  return impl_->skipped;
}
std::uint64_t Dataset::fingerprint() const {
  return impl_->fingerprint;
}

void Dataset::training_sequence(std::int64_t index, std::span<std::int64_t> out) const {
  if (index < 0) fail(io::ErrorKind::usage, "", "a sequence's index is not negative");
  const std::int64_t count = training_sequences();
  const std::uint64_t key = mix(mix(impl_->options.seed + 1) + static_cast<std::uint64_t>(index / count));
  const auto shuffled = permute(static_cast<std::uint64_t>(index % count), static_cast<std::uint64_t>(count), key);
  impl_->read(impl_->training_position(static_cast<std::int64_t>(shuffled)), out);
}

void Dataset::held_out_sequence(std::int64_t index, std::span<std::int64_t> out) const {
  if (index < 0 || index >= impl_->held_out)
    fail(io::ErrorKind::usage, "", fmt::format("there are {} held-out sequences", impl_->held_out));
  impl_->read(impl_->held_out_position(index), out);
}

}  // namespace tierflow

#include "runtime/data/data.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "runtime/base/exception.h"
#include "runtime/base/files.h"
#include "runtime/base/mix_bits.h"
#include "runtime/data/data_part.h"

namespace tierflow {
namespace {

constexpr std::int64_t kFinest = 1000;  // weights are told apart to this share of their sum

// Whole numbers in the weights' proportion, without a common factor.
std::vector<std::int64_t> proportions(const std::vector<double>& weights) {
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<std::int64_t> parts;
  std::int64_t factor = 0;
  for (const double weight : weights) {
    parts.push_back(std::max<std::int64_t>(1, std::llround(weight / sum * static_cast<double>(kFinest))));
    factor = std::gcd(factor, parts.back());
  }
  for (std::int64_t& part : parts) part /= factor;
  return parts;
}

}  // namespace

// Examples, which are pairs of sequences or single ones, come in blocks of as many as the proportions add up to, each
// block in an order of its own.
struct Dataset::Impl {
  std::int64_t length = 0;
  std::uint64_t key = 0;
  std::vector<DataPart> parts;
  std::vector<std::int64_t> shares{1};
  std::int64_t block = 1;
  std::int64_t group = 1;                   // sequences in an example
  std::int64_t training = 0, held_out = 0;  // examples
  std::uint64_t fingerprint = 0;

  struct Place {
    std::size_t part;
    std::int64_t index;
  };
  // A sequence of a part's source.
  Place in_source(Place example, std::int64_t place, std::int64_t sequence) const {
    return {example.part, place * group + sequence % group};
  }
  Place training_sequence(std::int64_t sequence) const {
    if (sequence < 0) fail(io::ErrorKind::usage, "", "a sequence's index is not negative");
    const Place example = training_place(sequence / group);
    return in_source(example, parts[example.part].training_place(example.index), sequence);
  }
  Place held_out_sequence(std::int64_t sequence) const {
    if (sequence < 0 || sequence >= held_out * group)
      fail(io::ErrorKind::usage, "", fmt::format("there are {} held-out sequences", held_out * group));
    const Place example = held_out_place(sequence / group);
    return in_source(example, parts[example.part].held_out_place(example.index), sequence);
  }
  // The number of the sequence among those of all parts, and back.
  std::int64_t number(Place at) const {
    for (std::size_t part = 0; part < at.part; ++part) at.index += parts[part].source().count();
    return at.index;
  }
  Place numbered(std::int64_t number) const {
    std::size_t part = 0;
    while (number >= parts[part].source().count()) number -= parts[part++].source().count();
    return {part, number};
  }
  void read(Place at, std::span<std::int64_t> ids, std::span<std::int64_t> labels,
            std::span<std::int64_t> positions) const {
    check(ids);
    parts[at.part].source().read(at.index, ids, labels, positions);
  }

  // The part that a slot of a block belongs to.
  std::size_t owner(std::int64_t slot) const {
    std::size_t part = 0;
    while (slot >= shares[part]) slot -= shares[part++];
    return part;
  }

  Place training_place(std::int64_t index) const {
    if (parts.size() == 1) return {0, index};
    const std::int64_t number = index / block;
    const std::uint64_t order = mix_bits(key + static_cast<std::uint64_t>(number));
    const auto slot = [&](std::int64_t i) {
      return owner(
          static_cast<std::int64_t>(permute(static_cast<std::uint64_t>(i), static_cast<std::uint64_t>(block), order)));
    };
    const std::size_t part = slot(index % block);
    std::int64_t before = 0;
    for (std::int64_t i = 0; i < index % block; ++i) before += slot(i) == part ? 1 : 0;
    return {part, number * shares[part] + before};
  }

  Place held_out_place(std::int64_t index) const {
    if (parts.size() > 1)  // the first of them are a sample of all
      index = static_cast<std::int64_t>(
          permute(static_cast<std::uint64_t>(index), static_cast<std::uint64_t>(held_out), 0));
    std::size_t part = 0;
    while (index >= parts[part].held_out()) index -= parts[part++].held_out();
    return {part, index};
  }

  void mix_parts() {
    group = parts.front().pairs() ? 2 : 1;
    for (const DataPart& part : parts)
      if (part.pairs() != parts.front().pairs())
        fail_input(part.summary().paths.front().string(),
                   "is mixed with other data, and some of them are pairs of chosen and rejected answers: pairs stand "
                   "alone");
    if (parts.size() == 1) {
      training = parts[0].training();
      fingerprint = parts[0].fingerprint();
    } else {
      block = std::accumulate(shares.begin(), shares.end(), std::int64_t{0});
      training = INT64_MAX;
      std::vector<std::uint64_t> shape;
      for (std::size_t i = 0; i < parts.size(); ++i) {
        training = std::min(training, std::max<std::int64_t>(1, parts[i].training() * block / shares[i]));
        shape.push_back(parts[i].fingerprint());
        shape.push_back(static_cast<std::uint64_t>(shares[i]));
      }
      fingerprint = XXH3_64bits(shape.data(), shape.size() * sizeof shape[0]);
    }
    for (const DataPart& part : parts) held_out += part.held_out();
  }

  void check(std::span<const std::int64_t> ids) const {
    if (static_cast<std::int64_t>(ids.size()) != length)
      fail(io::ErrorKind::usage, "", fmt::format("a sequence has {} tokens, not {}", length, ids.size()));
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
  if (constexpr std::array known{"auto", "bfd", "none", "concat"};
      std::ranges::find(known, options.packing) == known.end())
    fail(io::ErrorKind::usage, "",
         fmt::format("packing is \"{}\"; there are auto, bfd, none, concat", printable(options.packing)));
  if (options.train_on != "assistant" && options.train_on != "all")
    fail(io::ErrorKind::usage, "",
         fmt::format("what rows are trained on is \"{}\"; there are assistant, all", printable(options.train_on)));
  if (constexpr std::array known{"auto", "text", "messages", "prompt-completion", "sharegpt", "alpaca", "tokens",
                                 "preference"};
      std::ranges::find(known, options.format) == known.end())
    fail(io::ErrorKind::usage, "",
         fmt::format("the rows' format is \"{}\"; there are {}", printable(options.format), fmt::join(known, ", ")));
  if (options.vocab_size < 1 || options.vocab_size > INT32_MAX)
    fail(io::ErrorKind::usage, "", "the vocabulary's size must be given");
  if (!options.weights.empty() && options.weights.size() != options.paths.size())
    fail(io::ErrorKind::usage, "",
         fmt::format("--data-weights has {} numbers for {} --data entries: give one for each", options.weights.size(),
                     options.paths.size()));
  if (!std::all_of(options.weights.begin(), options.weights.end(), [](double w) { return std::isfinite(w) && w > 0; }))
    fail(io::ErrorKind::usage, "", "--data-weights must be above 0");
  auto impl = std::make_unique<Impl>();
  impl->length = options.sequence_length;
  impl->key = mix_bits(mix_bits(options.seed + 1) + 0x6d6978);
  if (options.weights.size() < 2) {
    impl->parts.emplace_back(options, options.paths, 0);
  } else {
    impl->shares = proportions(options.weights);
    for (std::size_t i = 0; i < options.paths.size(); ++i)
      impl->parts.emplace_back(options, std::vector{options.paths[i]}, i);
  }
  impl->mix_parts();
  return Dataset(std::move(impl));
}

std::int64_t Dataset::training_sequences() const {
  return impl_->training * impl_->group;
}
std::int64_t Dataset::held_out_sequences() const {
  return impl_->held_out * impl_->group;
}
std::int64_t Dataset::sequence_length() const {
  return impl_->length;
}
std::int64_t Dataset::tokens() const {
  std::int64_t tokens = 0;
  for (const DataPart& part : impl_->parts) tokens += part.summary().tokens;
  return tokens;
}
std::uint64_t Dataset::fingerprint() const {
  return impl_->fingerprint;
}

std::uint64_t Dataset::sequences_hash() const {
  std::vector<std::uint64_t> parts;
  for (const DataPart& part : impl_->parts) parts.push_back(part.sequences_hash());
  return XXH3_64bits(parts.data(), parts.size() * sizeof parts[0]);
}

std::vector<DataSummary> Dataset::summaries() const {
  std::vector<DataSummary> all;
  for (std::size_t i = 0; i < impl_->parts.size(); ++i) {
    all.push_back(impl_->parts[i].summary());
    all.back().share = static_cast<double>(impl_->shares[i]) / static_cast<double>(impl_->block);
  }
  return all;
}

void Dataset::write_rows(const std::filesystem::path& out) const {
  if (impl_->parts.size() != 1)
    fail(io::ErrorKind::usage, out.string(), "holds one dataset: leave out the weights, and prepare each by itself");
  const DataSummary summary = impl_->parts[0].summary();
  if (!summary.rows)
    fail(io::ErrorKind::usage, out.string(), "holds rows of conversations; text is read at each start");
  write_copy(out, open_regular(summary.rows->prepared), summary.rows->prepared);
}

bool Dataset::pairs() const {
  return impl_->group == 2;
}

bool Dataset::isolated() const {
  return std::any_of(impl_->parts.begin(), impl_->parts.end(), [](const DataPart& part) { return part.isolated(); });
}

void Dataset::training_sequence(std::int64_t index, std::span<std::int64_t> ids, std::span<std::int64_t> labels,
                                std::span<std::int64_t> positions) const {
  impl_->read(impl_->training_sequence(index), ids, labels, positions);
}

std::vector<DocumentSpan> Dataset::training_documents(std::int64_t index) const {
  if (impl_->parts.size() > 1)
    fail(io::ErrorKind::usage, "",
         "data that is mixed by --data-weights has no one order of documents: give one --data without");
  return impl_->parts[0].source().documents(impl_->training_sequence(index).index);
}

std::int64_t Dataset::training_tokens(std::int64_t index) const {
  const auto [part, at] = impl_->training_sequence(index);
  return impl_->parts[part].source().tokens(at);
}

void Dataset::held_out_sequence(std::int64_t index, std::span<std::int64_t> ids, std::span<std::int64_t> labels,
                                std::span<std::int64_t> positions) const {
  impl_->read(impl_->held_out_sequence(index), ids, labels, positions);
}

std::int64_t Dataset::all_sequences() const {
  std::int64_t all = 0;
  for (const DataPart& part : impl_->parts) all += part.source().count();
  return all;
}

void Dataset::numbered_sequence(std::int64_t number, std::span<std::int64_t> ids, std::span<std::int64_t> labels,
                                std::span<std::int64_t> positions) const {
  if (number < 0 || number >= all_sequences())
    fail(io::ErrorKind::usage, "", fmt::format("there are {} sequences", all_sequences()));
  impl_->read(impl_->numbered(number), ids, labels, positions);
}

std::int64_t Dataset::number_of_training(std::int64_t index) const {
  return impl_->number(impl_->training_sequence(index));
}

std::int64_t Dataset::number_of_held_out(std::int64_t index) const {
  return impl_->number(impl_->held_out_sequence(index));
}

}  // namespace tierflow

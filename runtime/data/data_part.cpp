#include "runtime/data/data_part.h"

#include <fmt/format.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <set>

#include "runtime/base/exception.h"
#include "runtime/base/mix_bits.h"
#include "runtime/data/document_sinks.h"
#include "runtime/data/prepare_rows.h"
#include "runtime/data/row_format.h"
#include "runtime/data/tokenizer_process.h"

namespace tierflow {
namespace {

std::string joined(const nlohmann::json& list) {
  std::string text;
  for (const auto& item : list) text += (text.empty() ? "" : ", ") + item.get<std::string>();
  return text;
}

// What the notes of a file of rows say.
void read_notes(const RowFile& file, DataSummary& summary) {
  const auto notes = nlohmann::json::parse(file.notes(), nullptr, false);
  const auto bad = [&] { fail_input(file.path().string(), "has notes that this program did not write"); };
  if (!notes.is_object()) bad();
  RowSummary& rows = *summary.rows;
  try {
    std::set<std::string> formats;
    for (const auto& made_of : notes.at("files")) formats.insert(made_of.at("format").get<std::string>());
    rows.formats = fmt::format("{}", fmt::join(formats, ", "));
    rows.masks = joined(notes.at("masks"));
    rows.train_on = notes.at("train_on");
    rows.untrained = notes.at("untrained");
    rows.merged = notes.at("merged");
    summary.skipped = notes.at("skipped");
    summary.first_skipped = notes.at("first_skipped");
  } catch (const nlohmann::json::exception&) {
    bad();
  }
}

// The formats of the sources' rows; none where they are text.
std::vector<std::string> formats_of(const DataOptions& options, const std::vector<Source>& sources) {
  std::vector<std::string> formats;
  const bool packs = options.packing == "none" || options.packing == "bfd";
  bool examples = packs;
  for (const Source& source : sources) {
    formats.push_back(source.kind == SourceKind::jsonl ? row_format(source.path, options) : "");
    examples = examples || (!formats.back().empty() && formats.back() != "text");
  }
  if (!examples) return {};
  const auto preferences = std::count(formats.begin(), formats.end(), kPreferenceFormat);
  if (preferences != 0 && preferences != static_cast<std::ptrdiff_t>(formats.size()))
    fail_input(sources.front().path.string(),
               "stands beside other data, and some of them are pairs of chosen and "
               "rejected answers: pairs stand alone");
  for (std::size_t i = 0; i < sources.size(); ++i)
    if (formats[i].empty())
      fail_input(sources[i].path.string(),
                 packs
                     ? "has no rows: --packing " + options.packing + " takes .jsonl and .tfd files"
                     : "is no .jsonl file, but others are rows of conversations: name them apart, with --data-weights");
  return formats;
}

// Refuses pairs where none are wanted, and others where they are.
void check_pairs(const DataOptions& options, const std::string& path, bool pairs) {
  if (pairs && options.pairs == Pairs::none)
    fail(io::ErrorKind::usage, path,
         "holds pairs of chosen and rejected answers: `tierflow train` takes them with --loss dpo, simpo or orpo");
  if (!pairs && options.pairs == Pairs::only)
    fail(io::ErrorKind::usage, path,
         "holds no pairs: --loss dpo, simpo and orpo take rows with \"chosen\" and \"rejected\" (docs/preferences.md)");
  if (pairs && options.packing != "auto" && options.packing != "none")
    fail(io::ErrorKind::usage, path, "holds pairs: each answer is a sequence of its own, leave --packing out");
  if (pairs && options.train_on == "all")
    fail(io::ErrorKind::usage, path, "holds pairs: a preference loss is of the answers alone, leave --train-on out");
}

std::uint64_t hash_of(std::initializer_list<std::uint64_t> numbers) {
  return XXH3_64bits(numbers.begin(), numbers.size() * sizeof(std::uint64_t));
}

Packing packing_of(const std::string& name) {
  return name == "bfd" ? Packing::bfd : name == "concat" ? Packing::concat : Packing::none;
}

}  // namespace

// A Feistel network on the next even number of bits, walked until it lands below n.
std::uint64_t permute(std::uint64_t index, std::uint64_t n, std::uint64_t key) {
  if (n < 2) return 0;
  const int half = (std::bit_width(n - 1) + 1) / 2;
  const std::uint64_t mask = (std::uint64_t{1} << half) - 1;
  do {
    std::uint64_t left = index >> half, right = index & mask;
    for (std::uint64_t round = 0; round < 6; ++round) {
      const std::uint64_t next = left ^ (mix_bits(right + key + (round + 1) * 0x9e3779b97f4a7c15u) & mask);
      left = right;
      right = next;
    }
    index = left << half | right;
  } while (index >= n);
  return index;
}

DataPart::DataPart(const DataOptions& options, std::vector<std::filesystem::path> paths, std::size_t number)
    : length_(options.sequence_length), key_(mix_bits(options.seed + 1) + mix_bits(number)) {
  OtherFiles others;
  const std::vector<Source> sources = list_sources(paths, others);
  summary_.other_files = others.count;
  summary_.first_other_file = others.first.string();
  summary_.paths = std::move(paths);
  const bool prepared =
      std::any_of(sources.begin(), sources.end(), [](const Source& source) { return source.kind == SourceKind::rows; });
  if (prepared && sources.size() > 1)
    fail_input(sources.front().path.string(),
               "stands beside other data: name prepared .tfd files apart, with --data-weights");
  const std::vector<std::string> formats = prepared ? std::vector<std::string>() : formats_of(options, sources);
  const bool pairs =
      prepared ? RowFile(sources.front().path).pairs() : !formats.empty() && formats.front() == kPreferenceFormat;
  check_pairs(options, sources.front().path.string(), pairs);
  group_ = pairs ? 2 : 1;
  if (prepared || !formats.empty())
    prepare_examples(options, sources, formats);
  else
    prepare_text(options, sources);
  summary_.sequences = source_->count();
  summary_.held_out = held_out_ * group_;
}

void DataPart::prepare_text(const DataOptions& options, const std::vector<Source>& sources) {
  if (std::ranges::any_of(sources, [](const Source& source) {
        return source.kind == SourceKind::text || source.kind == SourceKind::jsonl;
      }))
    expect_tokenizer(options);
  store_ = std::make_unique<TokenStore>(options.cache, options.vocab_size);
  const auto sink = options.tokenizer.empty() ? make_byte_sink(*store_) : make_tokenizer_sink(*store_, options);
  for (const Source& source : sources) read_source(source, options, *sink);
  sink->finish();
  store_->seal();

  const std::string first = summary_.paths.front().string();
  const bool empty = store_->size() == 0 || !sink->content();
  if (empty && sink->skipped() != 0)
    fail_input(first, fmt::format("holds no text: all of its records were passed over, {} of them. The first: {}",
                                  sink->skipped(), sink->first_skipped().message()));
  if (empty) fail_input(first, "holds no text: every file is empty or blank");
  source_ = std::make_unique<TextSequences>(*store_, length_);
  if (source_->count() == 0)
    fail_input(
        first,
        fmt::format("holds {} tokens, fewer than one sequence of {}; give more text or a smaller --sequence-length",
                    store_->size(), length_));
  hold_out(options.held_out);
  const auto size = static_cast<std::uint64_t>(store_->size()), length = static_cast<std::uint64_t>(length_),
             width = static_cast<std::uint64_t>(token_width(options.vocab_size));
  fingerprint_ = hash_of({store_->hash(), size, length, static_cast<std::uint64_t>(held_out_), width, options.seed});
  sequences_hash_ = hash_of({store_->hash(), size, length, width});
  summary_.packing = "concat";
  summary_.tokens = store_->size();
  summary_.skipped = sink->skipped();
  if (summary_.skipped != 0) summary_.first_skipped = sink->first_skipped().message();
}

void DataPart::prepare_examples(const DataOptions& options, const std::vector<Source>& sources,
                                const std::vector<std::string>& formats) {
  const std::string first = sources.front().path.string();
  RowFile file = formats.empty() ? RowFile(sources.front().path) : prepare_rows(options, sources, formats);
  if (file.counts().rows != 0 && file.counts().largest_id >= options.vocab_size)
    fail_input(first,
               fmt::format("comes to the token id {}, but the model's vocabulary ends at {}: it is prepared with "
                           "another model's tokenizer",
                           file.counts().largest_id, options.vocab_size - 1));
  summary_.packing = pairs() ? "none" : options.packing == "auto" ? "bfd" : options.packing;
  const Packing packing = packing_of(summary_.packing);
  isolated_ = packing == Packing::bfd;
  auto packed = std::make_unique<PackedRows>(std::move(file), packing, length_, options.cache, options.progress);
  const RowFile& prepared = packed->rows();
  summary_.rows = packed->summary();
  read_notes(prepared, summary_);
  RowSummary& rows = *summary_.rows;
  rows.prepared = prepared.path();
  summary_.tokens = rows.tokens;
  source_ = std::move(packed);
  if (source_->count() == 0) {
    std::string why = packing == Packing::concat && rows.untrained < rows.examples
                          ? fmt::format("holds {} tokens, fewer than one sequence of {}: {} examples", rows.tokens,
                                        length_, rows.examples)
                          : fmt::format("holds nothing to train on: {} examples", rows.examples);
    if (rows.untrained != 0) why += fmt::format(", {} rows without a token to train on", rows.untrained);
    if (rows.untrained_when_cut != 0)
      why += fmt::format(", {} without one in the first {} tokens (a larger --sequence-length keeps more)",
                         rows.untrained_when_cut, length_);
    if (summary_.skipped != 0)
      why += fmt::format(", {} passed over; the first: {}", summary_.skipped, summary_.first_skipped);
    fail_input(first, why);
  }
  hold_out(options.held_out);
  const RowCounts& counts = prepared.counts();
  const std::uint64_t length = static_cast<std::uint64_t>(length_),
                      packed_how = static_cast<std::uint64_t>(packing) + (pairs() ? 16 : 0);
  fingerprint_ = hash_of({prepared.hash(), counts.rows, counts.tokens, length, static_cast<std::uint64_t>(held_out_),
                          packed_how, options.seed});
  sequences_hash_ = hash_of({prepared.hash(), counts.rows, counts.tokens, length, packed_how});
}

void DataPart::hold_out(double share) {
  if (examples() > 1 && share > 0)
    held_out_ = std::clamp<std::int64_t>(std::llround(share * static_cast<double>(examples())), 1, examples() - 1);
}

// Held-out examples lie evenly through the data: the k-th is the middle one of the k-th of `held_out` equal parts.
std::int64_t DataPart::held_out_place(std::int64_t k) const {
  return static_cast<std::int64_t>((static_cast<__int128>(2 * k + 1) * examples()) / (2 * held_out_));
}

// The j-th of the examples that are not held out.
std::int64_t DataPart::training_position(std::int64_t j) const {
  std::int64_t low = 0, high = held_out_;  // how many held-out ones come before it
  while (low < high) {
    const std::int64_t middle = (low + high) / 2;
    if (held_out_place(middle) - middle <= j) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return j + low;
}

std::int64_t DataPart::training_place(std::int64_t index) const {
  const std::int64_t count = training();
  const std::uint64_t key = mix_bits(key_ + static_cast<std::uint64_t>(index / count));
  const auto shuffled = permute(static_cast<std::uint64_t>(index % count), static_cast<std::uint64_t>(count), key);
  return training_position(static_cast<std::int64_t>(shuffled));
}

}  // namespace tierflow

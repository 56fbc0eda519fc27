#include "runtime/program/data_command.h"

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>

#include "runtime/base/exception.h"
#include "runtime/base/files.h"
#include "runtime/base/signals.h"
#include "runtime/data/data_json.h"
#include "runtime/data/token_texts.h"
#include "runtime/program/data_report.h"

namespace tierflow {
namespace {

using Clock = std::chrono::steady_clock;

// From the third second on, a line on standard error that is written over; elsewhere than on a terminal, one every ten
// seconds.
class Shown {
 public:
  ~Shown() {
    if (shown_ && terminal_) std::fputs("\n", stderr);
  }
  void operator()(const char* phase, std::uint64_t done, std::uint64_t total) {
    throw_if_stopped();
    const auto now = Clock::now();
    if (now - last_ < (terminal_ || !shown_ ? std::chrono::seconds(2) : std::chrono::seconds(10))) return;
    last_ = now;
    shown_ = true;
    const double share = total == 0 ? 1 : static_cast<double>(done) / static_cast<double>(total);
    std::fputs(
        fmt::format("{}{}: {:.0f}%{}", terminal_ ? "\r" : "", phase, 100 * share, terminal_ ? " " : "\n").c_str(),
        stderr);
  }

 private:
  const bool terminal_ = isatty(STDERR_FILENO) == 1;
  Clock::time_point last_ = Clock::now();
  bool shown_ = false;
};

DataOptions resolved(const DataCommandOptions& options, Shown& shown) {
  DataOptions data = data_options(options, read_folder_spec(options.model, {}, options.read_as), temporary_folder());
  data.progress = [&shown](const char* phase, std::uint64_t done, std::uint64_t total) { shown(phase, done, total); };
  return data;
}

// Tokens that follow one another in a document and all count, or all do not.
struct Run {
  std::vector<std::int64_t> ids;
  bool trained = false, begins_document = false;
};

struct Sequence {
  std::vector<Run> runs;
  std::int64_t tokens = 0, trained = 0, documents = 1;
};

// Without the padding.
Sequence read_sequence(const Dataset& data, std::int64_t index, std::int64_t length) {
  std::vector<std::int64_t> ids(static_cast<std::size_t>(length)), labels(ids.size()), positions(ids.size());
  data.training_sequence(index, ids, labels, positions);
  const auto end = static_cast<std::size_t>(data.training_tokens(index));
  Sequence sequence;
  for (std::size_t i = 0; i < end; ++i) {
    const bool trained = i != 0 && labels[i - 1] != -100, begins = i != 0 && positions[i] == 0;
    if (i == 0 || begins || trained != sequence.runs.back().trained)
      sequence.runs.push_back({.ids = {}, .trained = trained, .begins_document = begins});
    sequence.runs.back().ids.push_back(ids[i]);
    sequence.trained += trained ? 1 : 0;
    sequence.documents += begins ? 1 : 0;
  }
  sequence.tokens = static_cast<std::int64_t>(end);
  return sequence;
}

// Fit for a terminal: what would move its cursor is shown as '?'.
std::string shown_text(const std::string& text) {
  std::string fit = text;
  for (char& c : fit)
    if ((static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\t') || c == 0x7f) c = '?';
  return fit;
}

}  // namespace

int run_data_prepare(const DataCommandOptions& options) {
  watch_signals();
  std::vector<DataSummary> summaries;
  {
    Shown shown;
    const Dataset data = Dataset::prepare(resolved(options, shown));
    summaries = data.summaries();
    if (!options.out.empty()) {
      data.write_rows(options.out);
      summaries[0].rows->prepared = options.out;
    }
  }
  if (options.json)
    std::cout << data_json(summaries).dump(2) << "\n";
  else
    std::cout << data_table(summaries, options.sequence_length);
  return 0;
}

int run_data_preview(const DataCommandOptions& options) {
  watch_signals();
  Shown shown;
  const DataOptions choice = resolved(options, shown);
  const Dataset data = Dataset::prepare(choice);
  TokenTexts texts(choice);
  const bool colours = isatty(STDOUT_FILENO) == 1;
  auto list = nlohmann::ordered_json::array();
  for (std::int64_t i = 0; i < std::min(options.examples, data.training_sequences()); ++i) {
    throw_if_stopped();
    const Sequence sequence = read_sequence(data, i, options.sequence_length);
    std::vector<std::vector<std::int64_t>> ids;
    for (const Run& run : sequence.runs) ids.push_back(run.ids);
    const std::vector<std::string> pieces = texts.decode(ids);
    if (options.json) {
      auto runs = nlohmann::ordered_json::array();
      for (std::size_t k = 0; k < pieces.size(); ++k)
        runs.push_back({{"text", pieces[k]},
                        {"ids", ids[k]},
                        {"trained", sequence.runs[k].trained},
                        {"begins_document", k == 0 || sequence.runs[k].begins_document}});
      list.push_back({{"tokens", sequence.tokens}, {"trained", sequence.trained}, {"runs", runs}});
      continue;
    }
    std::cout << fmt::format("{}=== sequence {}: {} tokens, {} trained{}\n", i == 0 ? "" : "\n", i + 1, sequence.tokens,
                             sequence.trained,
                             sequence.documents > 1 ? fmt::format(", {} documents", sequence.documents) : "");
    for (std::size_t k = 0; k < pieces.size(); ++k) {
      if (sequence.runs[k].begins_document) std::cout << "\n--- next document\n";
      const std::string text = shown_text(pieces[k]);
      if (!sequence.runs[k].trained)
        std::cout << text;
      else
        std::cout << (colours ? "\033[32m" : "{+") << text << (colours ? "\033[0m" : "+}");
    }
    std::cout << "\n";
  }
  if (options.json) std::cout << list.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
  return 0;
}

}  // namespace tierflow

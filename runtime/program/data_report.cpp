#include "runtime/program/data_report.h"

#include <fmt/format.h>

#include <algorithm>

namespace tierflow {
namespace {

constexpr std::size_t kBar = 40;  // columns

// With separators between thousands.
std::string number(std::int64_t value) {
  std::string text = std::to_string(value);
  for (auto at = static_cast<std::ptrdiff_t>(text.size()) - 3; at > 0; at -= 3)
    text.insert(static_cast<std::size_t>(at), ",");
  return text;
}

std::string counted(std::int64_t count, const char* one, const char* many) {
  return number(count) + " " + (count == 1 ? one : many);
}

std::string names(const DataSummary& data) {
  std::string text = data.paths.front().string();
  return data.paths.size() == 1 ? text : text + fmt::format(" and {} more", data.paths.size() - 1);
}

std::string trained_on(const RowSummary& rows) {
  if (rows.train_on == "all") return "all tokens count";
  const std::string counts = "the assistant's turns and completions count";
  return rows.masks.empty() || rows.masks == "generation" ? counts : counts + "; turns found by " + rows.masks;
}

std::string left_out(const DataSummary& data, std::int64_t length) {
  std::vector<std::string> parts;
  if (data.rows) {
    if (data.rows->truncated != 0)
      parts.push_back(fmt::format("{} cut at {} tokens", number(data.rows->truncated), length));
    if (data.rows->untrained != 0)
      parts.push_back(number(data.rows->untrained) + " left out, without a token to train on");
    if (data.rows->untrained_when_cut != 0)
      parts.push_back(
          fmt::format("{} left out, without one in the first {}", number(data.rows->untrained_when_cut), length));
    if (data.rows->merged != 0)
      parts.push_back(counted(data.rows->merged, "prompt", "prompts") + " whose end merges with the completion");
  }
  if (data.skipped != 0)
    parts.push_back(counted(data.skipped, "bad row", "bad rows") + " passed over, the first: " + data.first_skipped);
  if (data.other_files != 0)
    parts.push_back(counted(data.other_files, "file of another kind", "files of other kinds") +
                    " not read, the first: " + data.first_other_file);
  return fmt::format("{}", fmt::join(parts, "; "));
}

}  // namespace

std::vector<std::string> data_lines(const std::vector<DataSummary>& data, std::int64_t sequence_length) {
  std::vector<std::string> lines;
  for (const DataSummary& one : data) {
    if (data.size() == 1 && !one.rows && one.skipped == 0 && one.other_files == 0) continue;
    std::string line = "data: " + names(one);
    if (data.size() > 1) line += fmt::format(" ({:.1f}% of the sequences)", 100 * one.share);
    if (one.rows)
      line += fmt::format(": {} ({}), {} of {} tokens trained",
                          one.rows->pairs ? counted(one.rows->examples, "pair", "pairs")
                                          : counted(one.rows->examples, "example", "examples"),
                          one.rows->formats, number(one.rows->trained), number(one.rows->used));
    else
      line += ": " + number(one.tokens) + " tokens of text";
    const std::string rest = left_out(one, sequence_length);
    lines.push_back(line + (rest.empty() ? "" : "; " + rest));
  }
  return lines;
}

std::string data_table(const std::vector<DataSummary>& data, std::int64_t sequence_length) {
  std::string text;
  const auto line = [&](const char* name, const std::string& value) {
    text += fmt::format("  {:<12}{}\n", name, value);
  };
  for (const DataSummary& one : data) {
    text += names(one) + "\n";
    if (data.size() > 1) line("share", fmt::format("{:.1f}% of the sequences", 100 * one.share));
    if (one.rows) {
      const RowSummary& rows = *one.rows;
      line("format", rows.formats);
      line(rows.pairs ? "pairs" : "examples", number(rows.examples));
      line("tokens", number(rows.tokens));
      line("trained", fmt::format("{} ({}; {})", number(rows.trained),
                                  fmt::format("{:.1f}% of {}",
                                              100.0 * static_cast<double>(rows.trained) /
                                                  static_cast<double>(std::max<std::int64_t>(1, rows.used)),
                                              number(rows.used)),
                                  trained_on(rows)));
    } else {
      line("format", "text");
      line("tokens", number(one.tokens));
    }
    const double room = static_cast<double>(std::max<std::int64_t>(1, one.sequences * sequence_length));
    line(
        "sequences",
        fmt::format("{} of {} tokens, packing {}{}", number(one.sequences), sequence_length, one.packing,
                    one.rows ? fmt::format(", {:.1f}% full", 100.0 * static_cast<double>(one.rows->used) / room) : ""));
    if (const std::string rest = left_out(one, sequence_length); !rest.empty()) line("besides", rest);
    if (!one.rows) continue;
    line("kept in", one.rows->prepared.string());
    text += "  lengths\n";
    const auto& lengths = one.rows->lengths;
    const std::int64_t most = *std::max_element(lengths.begin(), lengths.end());
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      if (lengths[i] == 0) continue;
      const auto bar = static_cast<std::size_t>(lengths[i] * static_cast<std::int64_t>(kBar) / most);
      text += fmt::format("    up to {:>9}{:>12}  {}\n", number(std::int64_t{1} << i), number(lengths[i]),
                          std::string(std::max<std::size_t>(1, bar), '#'));
    }
  }
  return text;
}

}  // namespace tierflow

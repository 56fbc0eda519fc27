#include "runtime/data/row_format.h"

#include "runtime/base/exception.h"
#include "runtime/base/strict_json.h"
#include "runtime/data/line_reader.h"

namespace tierflow {
namespace {

constexpr int kMostLines = 1000;  // that are looked at

// Empty where the row is of no known format.
std::string format_of(const Json& row, const std::string& text_field, bool pairs) {
  if (!row.is_object()) return {};
  const auto has = [&](const char* name) { return row.contains(name) && !row[name].is_null(); };
  const auto list = [&](const char* name) { return has(name) && row[name].is_array(); };
  const bool preference = has("chosen") && has("rejected");
  if (pairs && preference) return kPreferenceFormat;
  if (row.contains(text_field) && row[text_field].is_string()) return "text";
  if (list("input_ids")) return "tokens";
  if (list("messages")) return "messages";
  if (list("conversations")) return "sharegpt";
  if (has("prompt") && has("completion")) return "prompt-completion";
  if (has("instruction") && has("output")) return "alpaca";
  if (preference) return kPreferenceFormat;
  return {};
}

}  // namespace

std::string row_format(const std::filesystem::path& path, const DataOptions& options) {
  if (options.format != "auto") return options.format;
  LineReader lines(path);
  std::string line;
  for (int looked = 0; looked < kMostLines && lines.next(line);) {
    const std::size_t first = line.find_first_not_of(" \t\r");
    if (first == std::string::npos) continue;
    ++looked;
    if (!options.skip_bad_records && line[first] == '[')
      fail_input(lines.where(),
                 "begins a JSON array: a row is a line with one object; `jq -c '.[]' a.json > a.jsonl` "
                 "makes such lines");
    const Json row = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    const std::string format =
        row.is_discarded() ? "" : format_of(row, options.jsonl_field, options.pairs == Pairs::only);
    if (!format.empty()) return format;
    if (!options.skip_bad_records) break;
  }
  return "text";
}

}  // namespace tierflow

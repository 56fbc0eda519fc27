#pragma once
// Files of rows, and the sequences that become of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "runtime/data/data.h"
#include "runtime/data/row_file.h"
#include "tests/support/temp_dir.h"

namespace tierflow::testing {

namespace fs = std::filesystem;
using Ids = std::vector<std::int64_t>;
using Row = std::vector<std::uint32_t>;

inline constexpr std::uint32_t T = kTrainedToken;
inline constexpr const char* kNotes =
    R"({"files":[{"format":"messages"}],"train_on":"assistant","masks":["generation"],"untrained":2,"skipped":1,"first_skipped":"a.jsonl:3: is no JSON","merged":0})";

class Rows : public ::testing::Test {
 protected:
  fs::path write(const std::string& name, const std::vector<Row>& rows, const std::string& notes = kNotes,
                 bool pairs = false) {
    RowFileWriter writer(dir_.path());
    for (const Row& row : rows) writer.add(row);
    writer.finish(dir_.path() / name, notes, pairs);
    return dir_.path() / name;
  }
  // A row of so many tokens from `first` on, trained from the second third on.
  static Row row(std::uint32_t first, std::uint32_t count) {
    Row words(count);
    for (std::uint32_t i = 0; i < count; ++i) words[i] = (first + i) | (3 * i >= count ? T : 0);
    return words;
  }
  Dataset prepare(const std::string& packing) {
    options_.packing = packing;
    return Dataset::prepare(options_);
  }
  struct Sequence {
    Ids ids, labels, positions;
  };
  Sequence sequence(const Dataset& data, std::int64_t index, bool held_out = false) const {
    const auto length = static_cast<std::size_t>(options_.sequence_length);
    Sequence all{Ids(length), Ids(length), Ids(length)};
    held_out ? data.held_out_sequence(index, all.ids, all.labels, all.positions)
             : data.training_sequence(index, all.ids, all.labels, all.positions);
    return all;
  }
  std::vector<Sequence> epoch(const Dataset& data) const {
    std::vector<Sequence> all;
    for (std::int64_t i = 0; i < data.training_sequences(); ++i) all.push_back(sequence(data, i));
    std::sort(all.begin(), all.end(), [](const Sequence& a, const Sequence& b) { return a.ids < b.ids; });
    return all;
  }

  TempDir dir_;
  DataOptions options_{.cache = dir_.path() / "cache", .vocab_size = 1000, .sequence_length = 8, .held_out = 0};
};

}  // namespace tierflow::testing

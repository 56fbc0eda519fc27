// Files of rows, byte for byte; and the sequences that rows are packed into and datasets mixed into.
#include <algorithm>
#include <fstream>
#include <numeric>
#include <set>
#include <sstream>

#include "runtime/data/data.h"
#include "runtime/data/row_file.h"
#include "runtime/data/sequences.h"
#include "tests/runtime/data/rows_fixture.h"
#include "tests/runtime/expect.h"

namespace tierflow::testing {
namespace {

using io::ErrorKind;
std::string bytes_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream bytes;
  bytes << file.rdbuf();
  return bytes.str();
}

std::string hex(const std::string& bytes) {
  std::string text;
  for (const unsigned char c : bytes) {
    text += "0123456789abcdef"[c >> 4];
    text += "0123456789abcdef"[c & 15];
  }
  return text;
}

TEST_F(Rows, TheFilesBytesNeverChange) {
  const fs::path path = write("a.tfd", {{1, 2 | T, 3 | T}, {7 | T, 300 | T}}, "{}");
  EXPECT_EQ(hex(bytes_of(path)),
            "544644524f57530a"
            "01000000"
            "2c010000"  // version, largest id
            "0200000000000000"
            "0500000000000000"
            "0300000000000000"  // rows, tokens, trained
            "878130188c392d1f"
            "0200000000000000"
            "79df930d92ce4314"  // hash, notes, check
            "03000000"
            "01000000"
            "02000080"
            "03000080"
            "02000000"
            "07000080"
            "2c010080"  // rows
            "7b7d");
  const RowFile file(path);
  EXPECT_EQ(file.counts().rows, 2u);
  EXPECT_EQ(file.counts().tokens, 5u);
  EXPECT_EQ(file.counts().trained, 3u);  // the first token of a row is predicted by none
  EXPECT_EQ(file.counts().largest_id, 300u);
  EXPECT_EQ(file.notes(), "{}");
  std::vector<std::pair<std::uint64_t, Row>> rows;
  file.read_all([&](std::uint64_t first, std::span<const std::uint32_t> row) {
    rows.emplace_back(first, Row(row.begin(), row.end()));
  });
  EXPECT_EQ(rows, (std::vector<std::pair<std::uint64_t, Row>>{{1, {1, 2 | T, 3 | T}}, {5, {7 | T, 300 | T}}}));
  Row words(2);
  file.read(5, words);
  EXPECT_EQ(words, (Row{7 | T, 300 | T}));
}

TEST_F(Rows, EveryByteIsGuarded) {
  const std::string good = bytes_of(write("a.tfd", {{1, 2 | T}, {7 | T, 9 | T, 4}}, "{\"x\":1}"));
  const fs::path path = dir_.path() / "b.tfd";
  const auto read = [&](const std::string& bytes) {
    write_file(path, bytes);
    RowFile(path).read_all([](auto, auto) {});
  };
  read(good);
  for (std::size_t at = 0; at < good.size(); ++at) {
    SCOPED_TRACE(at);
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 0x10);
    expect_refusal(at < 12 ? ErrorKind::input : ErrorKind::corruption, {"b.tfd"}, [&] { read(bad); });
  }
  for (std::size_t size = 0; size < good.size(); ++size)
    expect_refusal(size < 64 ? ErrorKind::input : ErrorKind::corruption, {"b.tfd"},
                   [&] { read(good.substr(0, size)); });
  expect_refusal(ErrorKind::corruption, {"b.tfd", "damaged"}, [&] { read(good + "x"); });
  expect_refusal(ErrorKind::input, {"b.tfd", "no prepared rows"},
                 [&] { read("\x80\x04 a pickle or so, and longer than a header would be: 64 bytes"); });
  std::string newer = good;
  newer[8] = 3;
  expect_refusal(ErrorKind::input, {"version 3", "prepare the data again"}, [&] { read(newer); });
}

TEST_F(Rows, NothingIsLeftOfAFileThatWasNotFinished) {
  const auto before = std::distance(fs::directory_iterator(dir_.path()), fs::directory_iterator());
  { RowFileWriter(dir_.path()).add(Row{1, 2}); }
  EXPECT_EQ(std::distance(fs::directory_iterator(dir_.path()), fs::directory_iterator()), before);
  write("a.tfd", {{1, 2 | T}});
  write("a.tfd", {{3, 4 | T}});  // replaces it
  EXPECT_EQ(std::distance(fs::directory_iterator(dir_.path()), fs::directory_iterator()), before + 1);
  EXPECT_EQ(RowFile(dir_.path() / "a.tfd").counts().largest_id, 4u);
}

TEST_F(Rows, OneASequenceIsPaddedAndCut) {
  options_.paths = {write("a.tfd", {row(10, 3), row(20, 12), {30, 31, 32, 33, 34, 35, 36, 37, 38 | T}, row(40, 8)})};
  const Dataset data = prepare("none");
  const auto all = epoch(data);
  ASSERT_EQ(all.size(), 3u);  // the third has nothing to train on in its first 8 tokens
  EXPECT_EQ(all[0].ids, (Ids{10, 11, 12, 0, 0, 0, 0, 0}));
  EXPECT_EQ(all[0].labels, (Ids{11, 12, -100, -100, -100, -100, -100, -100}));
  EXPECT_EQ(all[1].ids, (Ids{20, 21, 22, 23, 24, 25, 26, 27}));
  EXPECT_EQ(all[1].labels, (Ids{-100, -100, -100, 24, 25, 26, 27, -100}));
  EXPECT_EQ(all[2].labels, (Ids{-100, -100, 43, 44, 45, 46, 47, -100}));
  EXPECT_FALSE(data.isolated());
  const DataSummary summary = data.summaries().at(0);
  EXPECT_EQ(summary.sequences, 3);
  EXPECT_EQ(summary.share, 1);
  EXPECT_EQ(summary.skipped, 1);
  EXPECT_EQ(summary.first_skipped, "a.jsonl:3: is no JSON");
  ASSERT_TRUE(summary.rows);
  EXPECT_EQ(summary.rows->examples, 4);
  EXPECT_EQ(summary.rows->tokens, 32);
  EXPECT_EQ(summary.rows->used, 19);
  EXPECT_EQ(summary.rows->trained, 2 + 4 + 5);
  EXPECT_EQ(summary.rows->truncated, 1);
  EXPECT_EQ(summary.rows->untrained, 2);
  EXPECT_EQ(summary.rows->untrained_when_cut, 1);
  EXPECT_EQ(summary.rows->lengths[2], 1);  // 3 to 4
  EXPECT_EQ(summary.rows->lengths[3], 1);  // 5 to 8
  EXPECT_EQ(summary.rows->lengths[4], 2);  // 9 to 16
}

TEST_F(Rows, BestFitDecreasingIsolates) {
  // 6 5 4 3 2 2 into 8: 6 + 2, 5 + 3, 4 + 2.
  options_.paths = {
      write("a.tfd", {row(100, 2), row(200, 5), row(300, 3), row(400, 6), {500 | T, 501 | T}, row(600, 4)})};
  const Dataset data = prepare("bfd");
  EXPECT_TRUE(data.isolated());
  const auto all = epoch(data);
  ASSERT_EQ(all.size(), 3u);
  EXPECT_EQ(all[0].ids, (Ids{200, 201, 202, 203, 204, 300, 301, 302}));
  EXPECT_EQ(all[0].labels, (Ids{-100, 202, 203, 204, -100, 301, 302, -100}));
  EXPECT_EQ(all[0].positions, (Ids{0, 1, 2, 3, 4, 0, 1, 2}));
  EXPECT_EQ(all[1].ids, (Ids{400, 401, 402, 403, 404, 405, 100, 101}));
  EXPECT_EQ(all[1].positions, (Ids{0, 1, 2, 3, 4, 5, 0, 1}));
  EXPECT_EQ(all[2].ids, (Ids{600, 601, 602, 603, 500, 501, 0, 0}));
  EXPECT_EQ(all[2].labels, (Ids{-100, 602, 603, -100, 501, -100, -100, -100}));
  EXPECT_EQ(all[2].positions, (Ids{0, 1, 2, 3, 0, 1, 0, 1}));  // padding is a document of its own
  EXPECT_EQ(data.summaries()[0].rows->used, 22);
}

// Every row once, none cut but at the sequence's length, in as many sequences as the rule takes.
TEST_F(Rows, ManyRowsPackTightly) {
  std::vector<Row> rows;
  std::int64_t tokens = 0;
  for (std::uint32_t i = 0; i < 150'000; ++i) {  // more than are packed with each other
    rows.push_back(Row{i % 1000, (i / 1000) | T});
    for (std::uint32_t more = (i * 7919) % 11; more > 0; --more) rows.back().push_back(3 | T);
    tokens += std::min<std::int64_t>(8, static_cast<std::int64_t>(rows.back().size()));
  }
  options_.paths = {write("a.tfd", rows)};
  const Dataset data = prepare("bfd");
  std::vector<int> seen(150'000);
  for (std::int64_t i = 0; i < data.training_sequences(); ++i) {
    const Sequence one = sequence(data, i);
    for (std::size_t at = 0; at + 1 < one.ids.size(); ++at)
      if (one.positions[at] == 0 && one.labels[at] != -100)
        ++seen[static_cast<std::size_t>(one.ids[at] + 1000 * one.ids[at + 1])];
  }
  EXPECT_EQ(std::count(seen.begin(), seen.end(), 1), 150'000);
  EXPECT_EQ(data.summaries()[0].rows->used, tokens);
  EXPECT_LT(static_cast<double>(data.training_sequences()) * 8, 1.02 * static_cast<double>(tokens));
}

TEST_F(Rows, ConcatenationRunsThroughThem) {
  options_.paths = {
      write("a.tfd", {row(10, 3), row(20, 12), {30, 31, 32, 33, 34, 35, 36, 37, 38, 39 | T}, row(40, 9)})};
  const Dataset data = prepare("concat");
  EXPECT_FALSE(data.isolated());
  const auto all = epoch(data);
  ASSERT_EQ(all.size(), 3u);  // of 34 tokens four sequences; the third has nothing to train on
  EXPECT_EQ(all[0].ids, (Ids{10, 11, 12, 20, 21, 22, 23, 24}));
  EXPECT_EQ(all[0].labels, (Ids{11, 12, -100, -100, -100, -100, 24, -100}));
  EXPECT_EQ(all[1].ids, (Ids{25, 26, 27, 28, 29, 30, 31, 30}));
}

TEST_F(Rows, TheOrderIsThatOfTheSeedAndTheFingerprintTells) {
  const fs::path path = write("a.tfd", {row(10, 3), row(20, 4), row(30, 5), row(40, 5), row(50, 5)});
  options_.paths = {path};
  const auto first_ids = [&](const Dataset& data) {
    Ids ids;
    for (std::int64_t i = 0; i < 10; ++i) ids.push_back(sequence(data, i).ids[0]);
    return ids;
  };
  const Dataset data = prepare("none");
  EXPECT_EQ(first_ids(data), (Ids{30, 20, 10, 40, 50, 20, 40, 50, 10, 30}));
  EXPECT_EQ(data.fingerprint(), 14376910587095134640u);
  EXPECT_EQ(prepare("none").fingerprint(), data.fingerprint());
  std::set<std::uint64_t> different = {data.fingerprint(), prepare("bfd").fingerprint(),
                                       prepare("concat").fingerprint()};
  options_.seed = 1;
  const Dataset other = prepare("none");
  EXPECT_NE(first_ids(other), first_ids(data));
  different.insert(other.fingerprint());
  options_.seed = 0;
  options_.sequence_length = 9;
  different.insert(prepare("none").fingerprint());
  options_.sequence_length = 8;
  options_.held_out = 0.3;
  different.insert(prepare("none").fingerprint());
  options_.held_out = 0;
  Row changed = row(50, 5);
  changed[4] ^= T;
  options_.paths = {write("b.tfd", {row(10, 3), row(20, 4), row(30, 5), row(40, 5), changed})};
  different.insert(prepare("none").fingerprint());
  EXPECT_EQ(different.size(), 7u);
}

TEST_F(Rows, AFileOfNoUseIsRefused) {
  options_.paths = {write("a.tfd", {})};
  expect_refusal(ErrorKind::input, {"a.tfd", "nothing to train on", "2 rows without a token", "the first: a.jsonl:3"},
                 [&] { prepare("none"); });
  options_.paths = {write("b.tfd", {{1, 2, 3, 4, 5, 6, 7, 8, 9 | T}})};
  expect_refusal(ErrorKind::input, {"b.tfd", "first 8 tokens", "--sequence-length"}, [&] { prepare("none"); });
  options_.paths = {write("c.tfd", {row(998, 3)})};
  expect_refusal(ErrorKind::input, {"c.tfd", "token id 1000", "ends at 999"}, [&] { prepare("none"); });
  options_.paths = {write("d.tfd", {row(1, 3)}, "[]")};
  expect_refusal(ErrorKind::input, {"d.tfd", "notes"}, [&] { prepare("none"); });
  options_.paths = {write("e.tfd", {row(1, 3)}), write("f.tfd", {row(1, 3)})};
  expect_refusal(ErrorKind::input, {"e.tfd", "--data-weights"}, [&] { prepare("none"); });
  write_file(dir_.path() / "g.txt", "text");
  options_.paths = {dir_.path() / "g.txt"};
  expect_refusal(ErrorKind::input, {"g.txt", "--packing none"}, [&] { prepare("none"); });
}

// Three datasets in the proportion 5 : 3 : 2, told apart by their ids.
class Mix : public Rows {
 protected:
  void SetUp() override {
    options_.paths = {part(0, 40), part(1, 90), part(2, 17)};
    options_.weights = {0.5, 0.3, 0.2};
  }
  fs::path part(std::uint32_t number, std::uint32_t count) {
    std::vector<Row> rows;
    for (std::uint32_t i = 0; i < count; ++i) rows.push_back({100 * number + i, 1 | T});
    return write(std::to_string(number) + ".tfd", rows);
  }
};

TEST_F(Mix, WeightsAreSharesAndNothingComesTwiceBeforeAllCame) {
  const Dataset data = prepare("none");
  EXPECT_EQ(data.training_sequences(), 80);  // the first is used up after 40 / 0.5
  std::vector<Ids> parts(3);
  std::vector<int> first_ten(3);
  for (std::int64_t i = 0; i < 400; ++i) {
    const std::int64_t id = sequence(data, i).ids[0];
    parts[static_cast<std::size_t>(id / 100)].push_back(id);
    if (i < 10) ++first_ten[static_cast<std::size_t>(id / 100)];
  }
  EXPECT_EQ(first_ten, (std::vector<int>{5, 3, 2}));
  EXPECT_EQ(parts[0].size(), 200u);
  EXPECT_EQ(parts[1].size(), 120u);
  EXPECT_EQ(parts[2].size(), 80u);
  for (const auto& [part, count] : {std::pair{0, 40}, {1, 90}, {2, 17}})
    for (std::size_t begin = 0; begin + static_cast<std::size_t>(count) <= parts[static_cast<std::size_t>(part)].size();
         begin += static_cast<std::size_t>(count)) {
      const Ids& all = parts[static_cast<std::size_t>(part)];
      const std::set<std::int64_t> seen(all.begin() + static_cast<std::ptrdiff_t>(begin),
                                        all.begin() + static_cast<std::ptrdiff_t>(begin) + count);
      EXPECT_EQ(seen.size(), static_cast<std::size_t>(count)) << part << " from " << begin;
    }
  const auto summaries = data.summaries();
  ASSERT_EQ(summaries.size(), 3u);
  EXPECT_DOUBLE_EQ(summaries[1].share, 0.3);
  EXPECT_EQ(summaries[1].sequences, 90);
}

TEST_F(Mix, ASmallWeightIsNotNone) {
  options_.weights = {10'000, 1, 1};
  const Dataset data = prepare("none");
  EXPECT_DOUBLE_EQ(data.summaries()[1].share, 1.0 / 1002);
  std::vector<int> block(3);
  for (std::int64_t i = 0; i < 1002; ++i) ++block[static_cast<std::size_t>(sequence(data, i).ids[0] / 100)];
  EXPECT_EQ(block, (std::vector<int>{1000, 1, 1}));
}

TEST_F(Mix, SeedAndWeightsDecide) {
  const auto order = [&](const Dataset& data) {
    Ids ids;
    for (std::int64_t i = 0; i < 12; ++i) ids.push_back(sequence(data, i).ids[0]);
    return ids;
  };
  const auto parts = [&](const Dataset& data) {
    Ids numbers = order(data);
    for (std::int64_t& number : numbers) number /= 100;
    return numbers;
  };
  const Dataset data = prepare("none"), same = prepare("none");
  EXPECT_EQ(order(data), order(same));
  EXPECT_EQ(data.fingerprint(), same.fingerprint());
  options_.weights = {5, 3, 2};  // the same proportion
  EXPECT_EQ(prepare("none").fingerprint(), data.fingerprint());
  options_.weights = {5, 2, 3};
  EXPECT_NE(prepare("none").fingerprint(), data.fingerprint());
  options_.weights = {5, 3, 2};
  options_.seed = 3;
  EXPECT_NE(order(prepare("none")), order(data));
  EXPECT_NE(parts(prepare("none")), parts(data));
  std::swap(options_.paths[0], options_.paths[1]);
  EXPECT_NE(prepare("none").fingerprint(), data.fingerprint());
}

TEST_F(Mix, HeldOutSequencesAreASampleOfAll) {
  options_.held_out = 0.2;
  const Dataset data = prepare("none");
  EXPECT_EQ(data.held_out_sequences(), 8 + 18 + 3);
  std::set<std::int64_t> held, early_parts;
  for (std::int64_t i = 0; i < data.held_out_sequences(); ++i) {
    const std::int64_t id = sequence(data, i, true).ids[0];
    held.insert(id);
    if (i < 10) early_parts.insert(id / 100);
  }
  EXPECT_EQ(held.size(), 29u);
  EXPECT_EQ(early_parts.size(), 3u);
  for (std::int64_t i = 0; i < 200; ++i) EXPECT_EQ(held.count(sequence(data, i).ids[0]), 0u);
}

// An evaluation takes the first of them: after a run was gone on with, the same ones as before.
TEST_F(Mix, TheOrderOfHeldOutSequencesNeverChanges) {
  options_.held_out = 0.2;
  for (const std::uint64_t seed : {0, 3}) {
    options_.seed = seed;
    const Dataset data = prepare("none");
    Ids ids;
    for (std::int64_t i = 0; i < 12; ++i) ids.push_back(sequence(data, i, true).ids[0]);
    EXPECT_EQ(ids, (Ids{122, 172, 214, 127, 202, 157, 107, 7, 102, 22, 2, 167}));
    EXPECT_EQ(sequence(data, 28, true).ids[0], 162);
  }
}

TEST_F(Mix, TextAndRowsMix) {
  write_file(dir_.path() / "t.txt", std::string(80, 'x'));
  options_.paths = {part(0, 40), dir_.path() / "t.txt"};
  options_.weights = {1, 1};
  const Dataset data = prepare("auto");
  EXPECT_EQ(data.training_sequences(), 20);
  int text = 0;
  for (std::int64_t i = 0; i < 20; ++i) text += sequence(data, i).ids[0] == 'x' ? 1 : 0;
  EXPECT_EQ(text, 10);
}

TEST_F(Mix, WeightsThatMeanNothingAreRefused) {
  options_.weights = {1, 1};
  expect_refusal(ErrorKind::usage, {"2 numbers for 3"}, [&] { prepare("none"); });
  for (const double bad : {0.0, -1.0, std::numeric_limits<double>::infinity()}) {
    options_.weights = {1, 1, bad};
    expect_refusal(ErrorKind::usage, {"--data-weights"}, [&] { prepare("none"); });
  }
}

}  // namespace
}  // namespace tierflow::testing

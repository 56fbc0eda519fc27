#include "runtime/data/data.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "runtime/base/utf8.h"
#include "runtime/data/data_json.h"
#include "support/temp_dir.h"
#include "tests/runtime/expect.h"

namespace tierflow {
namespace {

namespace fs = std::filesystem;
using testing::expect_refusal;
using testing::write_file;

std::string numbers(std::size_t count) {
  std::string text;
  for (std::size_t i = 0; i < count; ++i) text += static_cast<char>('a' + i % 26);
  return text;
}

class Data : public ::testing::Test {
 protected:
  Dataset prepare(const std::string& name, const std::string& bytes) {
    write_file(dir_.path() / name, bytes);
    options_.paths = {dir_.path() / name};
    return Dataset::prepare(options_);
  }
  void refused(const std::string& name, const std::string& bytes, std::initializer_list<std::string_view> words) {
    SCOPED_TRACE(name);
    expect_refusal(io::ErrorKind::input, words, [&] { prepare(name, bytes); });
  }
  std::string text(const Dataset& data, std::int64_t index, bool held_out = false) const {
    std::vector<std::int64_t> ids(static_cast<std::size_t>(options_.sequence_length));
    held_out ? data.held_out_sequence(index, ids) : data.training_sequence(index, ids);
    return {ids.begin(), ids.end()};
  }

  testing::TempDir dir_;
  DataOptions options_{.cache = dir_.path() / "cache", .vocab_size = 256, .sequence_length = 8, .held_out = 0.1};
};

TEST_F(Data, EverySequenceComesOnceAnEpoch) {
  for (const std::size_t count : {1, 2, 3, 10, 64, 99, 1000}) {
    std::string all;
    for (std::size_t i = 0; i < count; ++i) {
      const std::string digits = std::to_string(i);
      all += std::string(8 - digits.size(), '0') + digits;
    }
    const Dataset data = prepare("a.txt", all + "rest");
    EXPECT_EQ(data.tokens(), static_cast<std::int64_t>(8 * count + 4));
    EXPECT_EQ(data.training_sequences() + data.held_out_sequences(), static_cast<std::int64_t>(count));
    EXPECT_EQ(data.held_out_sequences(),
              count == 1 ? 0 : std::max<std::int64_t>(1, std::llround(0.1 * static_cast<double>(count))));
    std::vector<std::string> first, second;
    std::set<std::string> seen;
    for (std::int64_t i = 0; i < data.held_out_sequences(); ++i) seen.insert(text(data, i, true));
    for (std::int64_t i = 0; i < data.training_sequences(); ++i) {
      first.push_back(text(data, i));
      second.push_back(text(data, i + data.training_sequences()));
    }
    seen.insert(first.begin(), first.end());
    EXPECT_EQ(seen.size(), count);
    if (count > 10) {
      EXPECT_NE(first, second);
      EXPECT_FALSE(std::is_sorted(first.begin(), first.end()));
    }
    std::sort(first.begin(), first.end());
    std::sort(second.begin(), second.end());
    EXPECT_EQ(first, second);
  }
}

TEST_F(Data, SeedDecidesTheOrderAndTheFingerprintTells) {
  const std::string bytes = numbers(4001);
  const Dataset data = prepare("a.txt", bytes);
  const std::string at_5 = text(data, 5);
  const Dataset same = prepare("b.txt", bytes);
  EXPECT_EQ(text(same, 5), at_5);
  EXPECT_EQ(same.fingerprint(), data.fingerprint());
  options_.seed = 1;
  const Dataset other = prepare("a.txt", bytes);
  EXPECT_NE(other.fingerprint(), data.fingerprint());
  bool differs = false;
  for (int i = 0; i < 20; ++i) differs = differs || text(other, i) != text(data, i);
  EXPECT_TRUE(differs);
  options_.seed = 0;
  EXPECT_NE(prepare("a.txt", bytes + "x").fingerprint(), data.fingerprint());
  options_.sequence_length = 16;
  EXPECT_NE(prepare("a.txt", bytes).fingerprint(), data.fingerprint());
}

TEST_F(Data, TheCacheHoldsNothingNamed) {
  const Dataset data = prepare("a.txt", numbers(100));
  EXPECT_TRUE(fs::is_empty(options_.cache));
}

TEST_F(Data, FoldersAreWalkedInOrderAndNotLeft) {
  const fs::path root = dir_.path() / "root";
  write_file(root / "b.py", "BBBBBBB");
  write_file(root / "a" / "z.md", "ZZZZZZZ");
  write_file(root / "c.txt", "CCCCCCC");
  write_file(root / "d.jpg", "DDDDDDD");
  write_file(root / "d.tfd", "DDDDDDD");  // prepared rows are named by themselves
  write_file(root / ".git" / "e.txt", "EEEEEEE");
  write_file(dir_.path() / "linked.txt", "LLLLLLL");
  fs::create_symlink("../linked.txt", root / "f.txt");
  fs::create_symlink("f.txt", root / "i.txt");
  fs::create_symlink("nowhere", root / "j.txt");
  fs::create_symlink("..", root / "g");
  fs::create_symlink("g", root / "h");
  options_.paths = {root};
  options_.held_out = 0;
  options_.sequence_length = 31;
  const Dataset data = Dataset::prepare(options_);
  ASSERT_EQ(data.tokens(), 31);
  EXPECT_EQ(text(data, 0), std::string("ZZZZZZZ\0BBBBBBB\0CCCCCCC\0LLLLLLL", 31)) << "files that are linked too";
}

TEST_F(Data, JsonLinesGiveTheirField) {
  options_.held_out = 0;
  options_.sequence_length = 7;
  const Dataset data = prepare("a.jsonl", "\xef\xbb\xbf{\"text\":\"abc\"}\r\n\n{\"x\":1,\"text\":\"d\\u00e9\"}");
  EXPECT_EQ(data.tokens(), 7);
  EXPECT_EQ(text(data, 0), std::string("abc\0d\xc3\xa9", 7));
  refused("b.jsonl", "{\"text\":\"abcdefgh\"}\n{\"body\":\"x\"}", {"b.jsonl:2", "--jsonl-field"});
  refused("c.jsonl", "{\"text\":\"abcdefgh\"}\nnot json", {"c.jsonl:2", "JSON"});
  refused("d.jsonl", "{\"text\":7}", {"d.jsonl:1"});
  refused("e.jsonl", "{\"text\":\"\xff\"}", {"e.jsonl:1"});
  refused("f.jsonl", "{\"text\":\"\\ud800\"}", {"f.jsonl:1"});
  options_.skip_bad_records = true;
  EXPECT_EQ(prepare("g.jsonl", "junk\n{\"text\":\"abcdefgh\"}\n[]\n").summaries().front().skipped, 2);
  options_.jsonl_field = "body";
  EXPECT_EQ(prepare("h.jsonl", "{\"body\":\"abcdefgh\"}\n").tokens(), 8);
}

std::string npy(const std::string& descr, const std::string& shape, const std::string& data) {
  std::string header = "{'descr': '" + descr + "', 'fortran_order': False, 'shape': " + shape + ", }";
  header.append(118 - header.size() - 1, ' ');
  header += '\n';
  return std::string("\x93NUMPY\x01\x00\x76\x00", 10) + header + data;
}

TEST_F(Data, TokenFiles) {
  options_.held_out = 0;
  options_.vocab_size = 1000;
  const std::string words("\x01\x00\x02\x00\x03\x00\x04\x00\x05\x00\x06\x00\x07\x00\xe7\x03", 16);
  std::vector<std::int64_t> ids(8);
  prepare("a.bin", words).training_sequence(0, ids);
  EXPECT_EQ(ids, (std::vector<std::int64_t>{1, 2, 3, 4, 5, 6, 7, 999}));
  prepare("a.npy", npy("<u2", "(8,)", words)).training_sequence(0, ids);
  EXPECT_EQ(ids, (std::vector<std::int64_t>{1, 2, 3, 4, 5, 6, 7, 999}));
  refused("b.bin", words.substr(0, 15), {"multiple of 2"});
  std::string wide;
  for (int i = 0; i < 64; ++i) wide += std::string{static_cast<char>(i), '\1', '\0', '\0'};
  refused("w.bin", wide, {"w.bin", "looks like words of 32 bits", "uint16"});
  wide[2] = '\1';
  prepare("v.bin", wide);
  refused("b.npy", npy("<u2", "(9,)", words), {"truncated"});
  refused("c.npy", npy("<u2", "(7,)", words), {"7 elements"});
  refused("d.npy", npy("<u2", "(2, 4)", words), {"one-dimensional"});
  refused("e.npy", npy("<f4", "(4,)", words), {"<f4"});
  refused("f.npy", npy(">u2", "(8,)", words), {">u2"});
  refused("g.npy", npy("|O", "(8,)", words), {"type |O"});
  refused("h.npy", npy("<u8", "(999999999999999999,)", words), {"truncated"});
  refused("i.npy", "\x93NUMPY", {"not a NumPy file"});
  refused("j.npy", std::string("\x93NUMPY\x02\x00\xff\xff\xff\xff", 12), {"header"});
  refused("k.npy", std::string("\x93NUMPY\x09\x00\x76\x00", 10) + words, {"format 9"});
  refused("l.npy", npy("<i2", "(8,)", words.substr(0, 14) + "\xff\xff"), {"negative", "vocabulary"});
  options_.vocab_size = 999;
  refused("m.bin", words, {"token id 999", "token 7", "998"});
  options_.vocab_size = 70000;
  prepare("n.bin", std::string("\x01\x00\x01\x00", 4) + std::string(28, '\0')).training_sequence(0, ids);
  EXPECT_EQ(ids[0], 65537);
}

TEST_F(Data, HostileTextIsRefused) {
  refused("a.txt", "", {"a.txt", "empty or blank"});
  refused("b.txt", "\n\n\r\n \t\n\n\n\n\n\n", {"blank"});
  refused("c.txt", "short", {"5 tokens", "--sequence-length"});
  refused("d.jpg", numbers(100), {"no known kind"});
  options_.vocab_size = 100;
  refused("e.txt", numbers(100), {"vocabulary ends at 99"});
  options_.vocab_size = 256;
  expect_refusal(io::ErrorKind::input, {"does not exist"}, [&] {
    options_.paths = {dir_.path() / "nothing.txt"};
    Dataset::prepare(options_);
  });
  expect_refusal(io::ErrorKind::input, {"holds no .txt"}, [&] {
    fs::create_directory(dir_.path() / "hollow");
    options_.paths = {dir_.path() / "hollow"};
    Dataset::prepare(options_);
  });
  expect_refusal(io::ErrorKind::usage, {"--data"}, [&] {
    options_.paths.clear();
    Dataset::prepare(options_);
  });
}

TEST_F(Data, WhatIsNoTextIsRefusedWithTheRemedy) {
  const std::string text = numbers(100);
  std::string utf16;
  for (const char c : text) (utf16 += c) += '\0';
  refused("a.txt", "\xff\xfe" + utf16, {"a.txt", "UTF-16", "iconv"});
  refused("b.txt", std::string("\xfe\xff\0a", 4) + utf16, {"b.txt", "UTF-16", "iconv"});
  refused("c.txt", utf16, {"c.txt", "zero byte at 1", "UTF-16", ".bin"});
  refused("d.txt", text + std::string(1, '\0'), {"d.txt", "zero byte at 100"});
  refused("e.txt", text + "\xe9t\xe9" + text, {"e.txt", "byte 100", "iconv", "--on-bad-row skip"});
  refused("f.txt", text + "\xe2\x82", {"f.txt", "byte 100"});
  refused("f.jsonl", "\xff\xfe{\0}\0", {"f.jsonl:1", "UTF-16"});
  // Where a piece ends, in the middle of a character; and what is wrong far behind.
  const std::string piece((1 << 20) - 1, 'a');
  EXPECT_EQ(prepare("g.txt", piece + "\xe2\x82\xac" + text).tokens(), (1 << 20) + 102);
  refused("h.txt", piece + "\xe2\x82" + text, {"byte 1048575"});
  refused("i.txt", piece + "aaa" + text + std::string(1, '\0') + text, {"zero byte at 1048678"});
  EXPECT_EQ(prepare("j.txt", "\xef\xbb\xbf" + text).tokens(), 100);

  options_.skip_bad_records = true;
  fs::create_directory(dir_.path() / "mixed");
  write_file(dir_.path() / "mixed" / "a.txt", text + "\xff");
  write_file(dir_.path() / "mixed" / "b.txt", text);
  options_.paths = {dir_.path() / "mixed"};
  const Dataset mixed = Dataset::prepare(options_);
  EXPECT_EQ(mixed.tokens(), 100);  // nothing of what came before the bad byte
  EXPECT_EQ(mixed.summaries().front().skipped, 1);
  refused("k.jsonl", "junk\n{\"text\":7}\n", {"k.jsonl", "all of its records", "2 of them", "k.jsonl:1", "JSON"});
}

TEST(DataJson, SaysAllThatBecameOfTheData) {
  RowSummary rows{.pairs = true,
                  .examples = 11,
                  .tokens = 12,
                  .used = 13,
                  .trained = 14,
                  .truncated = 15,
                  .untrained = 16,
                  .untrained_when_cut = 17,
                  .merged = 18,
                  .formats = "chats",
                  .masks = "template",
                  .train_on = "assistant",
                  .prepared = "rows.tfd"};
  rows.lengths[0] = 3;
  rows.lengths[5] = 4;
  const DataSummary text{.paths = {"a.txt", "b"},
                         .share = 0.25,
                         .tokens = 5,
                         .sequences = 6,
                         .held_out = 7,
                         .other_files = 8,
                         .first_other_file = "b/c.csv",
                         .packing = "split"};
  DataSummary chats{.paths = {"c.jsonl"}, .skipped = 2, .first_skipped = "line 3", .packing = "whole", .rows = rows};
  EXPECT_EQ(data_json({text, chats}).dump(), R"([{"data":["a.txt","b"],"share":0.25,"format":"text","packing":"split",)"
                                             R"("tokens":5,"sequences":6,"held_out":7,"bad_rows":0,)"
                                             R"("other_files":8,"first_other_file":"b/c.csv"},)"
                                             R"({"data":["c.jsonl"],"share":1.0,"format":"chats","packing":"whole",)"
                                             R"("tokens":0,"sequences":0,"held_out":0,"bad_rows":2,)"
                                             R"("first_bad_row":"line 3","examples":11,"tokens_in_sequences":13,)"
                                             R"("trained_tokens":14,"train_on":"assistant","masks":"template",)"
                                             R"("truncated":15,"dropped":{"untrained":16,"untrained_when_cut":17},)"
                                             R"("merged_prompts":18,"prepared":"rows.tfd","lengths":[)"
                                             R"({"up_to":1,"examples":3},{"up_to":32,"examples":4}]}])");
}

TEST(Utf8, InvalidBytesAreFoundWhereTheyAre) {
  EXPECT_EQ(find_invalid_utf8("plain \xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80 \xf4\x8f\xbf\xbf"), std::string_view::npos);
  for (const std::string_view bad :
       {"\x80", "\xff", "\xc0\x80", "\xc1\xbf", "\xe0\x80\x80", "\xed\xa0\x80", "\xf0\x80\x80\x80", "\xf4\x90\x80\x80",
        "\xf5\x80\x80\x80", "\xc3", "\xe2\x82", "\xf0\x9f\x98", "\xe2\x28\xa1"})
    EXPECT_EQ(find_invalid_utf8("ab" + std::string(bad)), 2u);
}

}  // namespace
}  // namespace tierflow

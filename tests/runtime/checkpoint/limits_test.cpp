// Limits of what is read, and what lies on either side of each.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>

#include "runtime/data/data.h"
#include "runtime/data/token_store.h"
#include "runtime/program/option_table.h"
#include "runtime/program/option_values.h"
#include "runtime/program/options.h"
#include "support/temp_dir.h"
#include "tests/runtime/expect.h"

namespace tierflow {
namespace {

namespace fs = std::filesystem;
using testing::expect_refusal;
using testing::write_file;

class Limits : public ::testing::Test {
 protected:
  Dataset prepare() { return Dataset::prepare(options_); }
  void refused(std::initializer_list<std::string_view> words, io::ErrorKind kind = io::ErrorKind::input) {
    expect_refusal(kind, words, [&] { prepare(); });
  }
  testing::TempDir dir_;
  DataOptions options_{.cache = dir_.path() / "cache", .vocab_size = 256, .sequence_length = 8, .held_out = 0};
};

TEST_F(Limits, FoldersAreFollowedToTheirDepth) {
  fs::path folder = dir_.path() / "root";
  options_.paths = {folder};
  for (int depth = 0; depth < 64; ++depth) folder /= "d";
  write_file(folder / "a.txt", "12345678");
  EXPECT_EQ(prepare().tokens(), 8);
  write_file(folder / "d" / "b.txt", "12345678");
  refused({"more than 64 folders deep"});
}

TEST_F(Limits, LinesAreReadToTheirLength) {
  const std::string frame = "{\"text\":\"\"}", most(64 << 20, 'x');
  options_.paths = {dir_.path() / "a.jsonl"};
  write_file(options_.paths[0], "\n{\"text\":\"" + most.substr(frame.size()) + "\"}\n");
  EXPECT_EQ(prepare().tokens(), static_cast<std::int64_t>(most.size() - frame.size()));
  write_file(options_.paths[0], "\n{\"text\":\"" + most.substr(frame.size() - 1) + "\"}\n");
  refused({"a.jsonl:2", "longer than 64 MiB"});
  options_.skip_bad_records = true;  // it may have no end: nothing to pass over
  refused({"a.jsonl:2", "longer than 64 MiB"});
}

TEST_F(Limits, OptionsOfADataset) {
  options_.paths = {dir_.path() / "a.txt"};
  write_file(options_.paths[0], "0123456789abcdef");
  options_.sequence_length = 2;
  EXPECT_EQ(prepare().training_sequences(), 8);
  options_.sequence_length = 1;
  refused({"--sequence-length must be at least 2"}, io::ErrorKind::usage);
  options_.sequence_length = 8;
  for (const double share : {-0.01, 1.0, 1.5, std::nan("")}) {
    options_.held_out = share;
    refused({"held-out share"}, io::ErrorKind::usage);
  }
  options_.held_out = 0.999;  // one is left to train on
  EXPECT_EQ(prepare().training_sequences(), 1);
  EXPECT_EQ(prepare().held_out_sequences(), 1);
  options_.held_out = 0;
  EXPECT_EQ(prepare().held_out_sequences(), 0);
  for (const std::int64_t size : {std::int64_t{0}, std::int64_t{1} << 31}) {
    options_.vocab_size = size;
    refused({"vocabulary's size"}, io::ErrorKind::usage);
  }
  options_.vocab_size = INT32_MAX;
  const Dataset data = prepare();
  std::vector<std::int64_t> ids(8), short_ids(7);
  EXPECT_THROW(data.training_sequence(-1, ids), Exception);
  EXPECT_THROW(data.training_sequence(0, short_ids), Exception);
  EXPECT_THROW(data.held_out_sequence(0, ids), Exception);
}

TEST_F(Limits, HeldOutSequencesLieEvenlyThroughTheData) {
  std::string all;
  for (char c = 'a'; c < 'k'; ++c) all += std::string(8, c);
  options_.paths = {dir_.path() / "a.txt"};
  options_.held_out = 0.2;
  write_file(options_.paths[0], all);
  const Dataset data = prepare();
  ASSERT_EQ(data.held_out_sequences(), 2);
  std::vector<std::int64_t> ids(8);
  data.held_out_sequence(0, ids);
  EXPECT_EQ(ids[0], 'c');  // the middle of the first half
  data.held_out_sequence(1, ids);
  EXPECT_EQ(ids[7], 'h');  // and of the second
  EXPECT_THROW(data.held_out_sequence(2, ids), Exception);
  EXPECT_THROW(data.held_out_sequence(-1, ids), Exception);
}

TEST_F(Limits, TokenIdsAreThoseOfTheVocabulary) {
  TokenStore store(dir_.path() / "cache", 65537);  // four bytes each
  store.append("x", std::vector<std::uint32_t>{0, 65536, 7});
  expect_refusal(io::ErrorKind::input, {"x", "token id 65537", "token 3", "ends at 65536"},
                 [&] { store.append("x", std::vector<std::uint32_t>{65537}); });
  expect_refusal(io::ErrorKind::input, {"negative or above"},
                 [&] { store.append("x", std::vector<std::uint32_t>{UINT32_MAX}); });
  std::vector<std::uint32_t> many(300000, 65536);  // more than is kept back
  store.append("x", many);
  store.seal();
  EXPECT_EQ(store.size(), 300003);
  std::vector<std::int64_t> ids(3);
  store.read(0, ids);
  EXPECT_EQ(ids, (std::vector<std::int64_t>{0, 65536, 7}));
  store.read(300000, ids);
  EXPECT_EQ(ids, (std::vector<std::int64_t>{65536, 65536, 65536}));
  EXPECT_THROW(store.read(300001, ids), Exception);
}

TEST_F(Limits, NumbersInOptions) {
  EXPECT_EQ(parse_integer("-9223372036854775808", "x"), INT64_MIN);
  for (const char* bad : {"", "9223372036854775808", "1.0", " 1", "1 ", "+1", "0x1"})
    expect_refusal(io::ErrorKind::usage, {"--x", "whole number"}, [&] { parse_integer(bad, "x"); });
  EXPECT_EQ(parse_number("1e-5", "x"), 1e-5);
  for (const char* bad : {"", "1,5", "1e", " 1", "1e400"})
    expect_refusal(io::ErrorKind::usage, {"--x", "a number"}, [&] { parse_number(bad, "x"); });
  for (const char* bad : {"nan", "inf", "-inf"})
    expect_refusal(io::ErrorKind::usage, {"--x", "finite"}, [&] { parse_number(bad, "x"); });
  EXPECT_EQ(parse_bytes("4194303TiB", "x"), std::uint64_t{4194303} << 40);
  expect_refusal(io::ErrorKind::usage, {"--x"}, [] { parse_bytes("4194304TiB", "x"); });
}

}  // namespace
}  // namespace tierflow

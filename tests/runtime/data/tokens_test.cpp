// What a run resumes by: the order of its sequences, the same in every build; and token files of every type and size.
#include <algorithm>
#include <csignal>
#include <cstring>
#include <numeric>

#include "runtime/base/signals.h"
#include "runtime/data/data.h"
#include "runtime/data/data_source.h"
#include "tests/runtime/expect.h"
#include "tests/support/child.h"
#include "tests/support/temp_dir.h"

namespace tierflow::testing {
namespace {

namespace fs = std::filesystem;
using io::ErrorKind;

class Tokens : public ::testing::Test {
 protected:
  Dataset prepare(const std::string& name, std::string_view bytes) {
    write_file(dir_.path() / name, bytes);
    options_.paths = {dir_.path() / name};
    return Dataset::prepare(options_);
  }
  void refused(ErrorKind kind, std::initializer_list<std::string_view> words, const std::string& name = "a.txt",
               std::string_view bytes = "0123456789") {
    expect_refusal(kind, words, [&] { prepare(name, bytes); });
  }
  std::vector<std::int64_t> all(const Dataset& data) {  // of a dataset of one sequence
    std::vector<std::int64_t> ids(static_cast<std::size_t>(data.tokens()));
    data.training_sequence(0, ids);
    return ids;
  }

  TempDir dir_;
  DataOptions options_{.cache = dir_.path() / "cache", .vocab_size = 256, .sequence_length = 2, .held_out = 0};
};

TEST_F(Tokens, WhoStopsTheRunIsHeededWhileItReads) {
  EXPECT_EQ(in_child([this] {
              watch_signals();
              std::raise(SIGTERM);
              try {
                prepare("a.txt", "0123456789");
              } catch (const Stopped& stopped) {
                return stopped.signal();
              }
              return 0;
            }),
            SIGTERM);
}

// Eleven sequences, "a!" to "k!", of which the middle one is held out.
TEST_F(Tokens, TheOrderOfASeedNeverChanges) {
  const std::string_view text = "a!b!c!d!e!f!g!h!i!j!k!";
  options_.held_out = 0.1;
  const auto order = [](const Dataset& data) {
    std::string letters;
    std::vector<std::int64_t> ids(2);
    for (int i = 0; i < 20; ++i) {
      data.training_sequence(i, ids);
      letters += static_cast<char>(ids[0]);
    }
    return letters;
  };
  const Dataset data = prepare("a.txt", text);
  EXPECT_EQ(order(data),
            "ciagkdhbej"
            "ihekcajbdg");
  EXPECT_EQ(data.fingerprint(), 12488243471373242453U);
  std::vector<std::int64_t> ids(2);
  data.held_out_sequence(0, ids);
  EXPECT_EQ(ids, (std::vector<std::int64_t>{'f', '!'}));
  options_.seed = 7;
  const Dataset other = prepare("a.txt", text);
  EXPECT_EQ(order(other),
            "akhcbedgji"
            "ahgdbjceki");
  EXPECT_EQ(other.fingerprint(), 9710127366909103241U);
}

TEST_F(Tokens, HeldOutSequencesLieEvenly) {
  options_.held_out = 0.3;
  const Dataset data = prepare("a.txt", "0a1a2a3a4a5a6a7a8a9a");
  ASSERT_EQ(data.held_out_sequences(), 3);
  std::vector<std::int64_t> ids(2);
  std::string held;
  for (int i = 0; i < 3; ++i) {
    data.held_out_sequence(i, ids);
    held += static_cast<char>(ids[0]);
  }
  EXPECT_EQ(held, "158");
  expect_refusal(ErrorKind::usage, {"there are 3 held-out"}, [&] { data.held_out_sequence(3, ids); });
  expect_refusal(ErrorKind::usage, {"there are 3 held-out"}, [&] { data.held_out_sequence(-1, ids); });
  expect_refusal(ErrorKind::usage, {"not negative"}, [&] { data.training_sequence(-1, ids); });
  ids.resize(3);
  expect_refusal(ErrorKind::usage, {"has 2 tokens, not 3"}, [&] { data.training_sequence(0, ids); });
  options_.held_out = 0.5;
  EXPECT_EQ(prepare("b.txt", "0a1a2a").held_out_sequences(), 2);
  options_.held_out = 0.99;
  EXPECT_EQ(prepare("c.txt", "0a1a2a").held_out_sequences(), 2);  // one is left to train on
  options_.held_out = 0.001;
  EXPECT_EQ(prepare("d.txt", "0a1a2a").held_out_sequences(), 1);
  EXPECT_EQ(prepare("e.txt", "0a").held_out_sequences(), 0);
}

TEST_F(Tokens, OptionsAreHeldToTheirLimits) {
  options_.sequence_length = 1;
  refused(ErrorKind::usage, {"--sequence-length", "at least 2"});
  options_.sequence_length = 10;
  EXPECT_EQ(prepare("a.txt", "0123456789").training_sequences(), 1);
  options_.sequence_length = 11;
  refused(ErrorKind::input, {"10 tokens", "one sequence of 11"});
  options_.sequence_length = 2;
  for (const double share : {-0.01, 1.0}) {
    options_.held_out = share;
    refused(ErrorKind::usage, {"held-out share"});
  }
  options_.held_out = 0;
  for (const std::int64_t size : {std::int64_t{0}, std::int64_t{1} << 31}) {
    options_.vocab_size = size;
    refused(ErrorKind::usage, {"vocabulary"});
  }
  options_.vocab_size = INT32_MAX;
  EXPECT_EQ(prepare("b.txt", "01").tokens(), 2);
}

TEST_F(Tokens, AWordIsAsWideAsTheVocabularyNeeds) {
  EXPECT_EQ(token_width(1), 2);
  EXPECT_EQ(token_width(65536), 2);
  EXPECT_EQ(token_width(65537), 4);
  options_.sequence_length = 4;
  options_.vocab_size = 65537;
  refused(ErrorKind::input, {"14 bytes", "multiple of 4", "uint32"}, "a.bin", std::string(14, '\0'));
  const std::string_view bytes("\x00\x00\x01\x00\xff\xff\x00\x00\x02\x00\x00\x00\x03\x00\x00\x00", 16);
  EXPECT_EQ(all(prepare("b.bin", bytes)), (std::vector<std::int64_t>{65536, 65535, 2, 3}));
}

std::string npy(int version, const std::string& type, std::size_t count, std::string_view data) {
  std::string header = "{'descr': '" + type + "', 'fortran_order': False, 'shape': (" + std::to_string(count) + ",), }";
  header.append(117 - header.size(), ' ');
  header += '\n';
  std::string file = "\x93NUMPY";
  file += {static_cast<char>(version), '\0', static_cast<char>(header.size()), '\0'};
  if (version > 1) file += {'\0', '\0'};
  return file + header + std::string(data);
}

template <class Word>
std::string bytes_of(std::initializer_list<Word> words) {
  std::string bytes(words.size() * sizeof(Word), '\0');
  std::memcpy(bytes.data(), std::data(words), bytes.size());
  return bytes;
}

TEST_F(Tokens, NumpyFilesOfEveryTypeAndVersion) {
  options_.sequence_length = 3;
  options_.vocab_size = 100000;
  using Ids = std::vector<std::int64_t>;
  const auto read = [&](const std::string& file) { return all(prepare("a.npy", file)); };
  for (const int version : {1, 2, 3})
    EXPECT_EQ(read(npy(version, "|u1", 3, bytes_of<std::uint8_t>({1, 200, 255}))), (Ids{1, 200, 255})) << version;
  EXPECT_EQ(read(npy(1, "<u2", 3, bytes_of<std::uint16_t>({1, 200, 65535}))), (Ids{1, 200, 65535}));
  EXPECT_EQ(read(npy(1, "<i2", 3, bytes_of<std::int16_t>({1, 200, 32767}))), (Ids{1, 200, 32767}));
  EXPECT_EQ(read(npy(1, "<u4", 3, bytes_of<std::uint32_t>({1, 200, 99999}))), (Ids{1, 200, 99999}));
  EXPECT_EQ(read(npy(1, "<i4", 3, bytes_of<std::int32_t>({1, 200, 99999}))), (Ids{1, 200, 99999}));
  EXPECT_EQ(read(npy(1, "<u8", 3, bytes_of<std::uint64_t>({0, 200, 99999}))), (Ids{0, 200, 99999}));
  EXPECT_EQ(read(npy(1, "<i8", 3, bytes_of<std::int64_t>({0, 200, 99999}))), (Ids{0, 200, 99999}));
  for (const std::string& file : {npy(1, "<i4", 3, bytes_of<std::int32_t>({1, -1, 2})),
                                  npy(1, "<i8", 3, bytes_of<std::int64_t>({1, INT64_MIN, 2})),
                                  npy(1, "<u8", 3, bytes_of<std::uint64_t>({1, (1ULL << 32) + 5, 2}))})
    refused(ErrorKind::input, {"a.npy", "negative or above 2^32-2", "token 1 of the data"}, "a.npy", file);
  const std::string good = npy(1, "|u1", 3, "abc");
  refused(ErrorKind::input, {"NumPy format 0"}, "b.npy", npy(0, "|u1", 3, "abc"));
  refused(ErrorKind::input, {"NumPy format 4"}, "b.npy", npy(4, "|u1", 3, "abc"));
  refused(ErrorKind::input, {"2 bytes of data", "truncated"}, "c.npy", good.substr(0, good.size() - 1));
  refused(ErrorKind::input, {"4 bytes of data"}, "d.npy", good + "d");
  refused(ErrorKind::input, {"its header has"}, "e.npy", good.substr(0, 100));
  refused(ErrorKind::input, {"11 bytes long"}, "f.npy", good.substr(0, 11));
  std::string fortran = good;
  fortran.replace(fortran.find("False"), 5, "True,");
  refused(ErrorKind::input, {"one-dimensional"}, "g.npy", fortran);
}

// Longer than every piece in which files are read, tokens packed, lines and documents taken.
TEST_F(Tokens, LongFilesComeWhole) {
  const std::size_t count = 700'001;
  std::string bytes(2 * count, '\0');
  for (std::size_t i = 0; i < count; ++i) {
    const auto id = static_cast<std::uint16_t>(i * 7 % 50000);
    std::memcpy(&bytes[2 * i], &id, 2);
  }
  options_.vocab_size = 50000;
  options_.sequence_length = static_cast<std::int64_t>(count);
  const auto ids = all(prepare("a.bin", bytes));
  for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(ids[i], static_cast<std::int64_t>(i * 7 % 50000)) << i;

  std::string text(2'500'000, ' ');
  for (std::size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>('a' + i % 23);
  options_.vocab_size = 256;
  options_.sequence_length = static_cast<std::int64_t>(text.size());
  const auto letters = all(prepare("b.txt", text));
  EXPECT_TRUE(std::equal(letters.begin(), letters.end(), text.begin(), text.end()));

  const std::string first = text.substr(0, 900'000), second = text.substr(7, 900'000), third = text.substr(9, 300'000);
  std::string lines, expected = first + '\0' + second + '\0' + third;
  for (const std::string& line : {first, second, third}) lines += "{\"text\": \"" + line + "\"}\r\n";
  options_.sequence_length = static_cast<std::int64_t>(expected.size());
  const auto documents = all(prepare("c.jsonl", lines));
  EXPECT_TRUE(std::equal(documents.begin(), documents.end(), expected.begin(), expected.end()));
}

TEST_F(Tokens, EmptyDocumentsLeaveNoMark) {
  options_.sequence_length = 3;
  const auto ids = all(prepare("a.jsonl", "{\"text\":\"\"}\n{\"text\":\"a\"}\n{\"text\":\"\"}\n{\"text\":\"b\"}"));
  EXPECT_EQ(ids, (std::vector<std::int64_t>{'a', 0, 'b'}));
}

TEST_F(Tokens, FoldersAreWalkedSoDeepAndNoDeeper) {
  fs::path deep = dir_.path() / "root";
  for (int i = 0; i < 64; ++i) deep /= "d";
  write_file(deep / "a.txt", "ab");
  OtherFiles others;
  const auto sources = list_sources({dir_.path() / "root"}, others);
  ASSERT_EQ(sources.size(), 1U);
  EXPECT_EQ(sources[0].path, deep / "a.txt");
  fs::create_directory(deep / "d");
  expect_refusal(ErrorKind::input, {"more than 64 folders deep"},
                 [&] { list_sources({dir_.path() / "root"}, others); });
}

TEST_F(Tokens, TheKindIsThatOfTheName) {
  const std::pair<const char*, SourceKind> kinds[] = {{"a.txt", SourceKind::text}, {"b.py", SourceKind::text},
                                                      {"c.md", SourceKind::text},  {"d.jsonl", SourceKind::jsonl},
                                                      {"e.npy", SourceKind::npy},  {"f.bin", SourceKind::bin}};
  std::vector<fs::path> paths;
  for (const auto& [name, kind] : kinds) {
    write_file(dir_.path() / "kinds" / name, "x");
    paths.push_back(dir_.path() / "kinds" / name);
  }
  write_file(dir_.path() / "kinds" / "g.json", "x");
  OtherFiles named, walked;
  for (const auto& sources : {list_sources(paths, named), list_sources({dir_.path() / "kinds"}, walked)}) {
    ASSERT_EQ(sources.size(), std::size(kinds));
    for (std::size_t i = 0; i < sources.size(); ++i) {
      EXPECT_EQ(sources[i].path, paths[i]);
      EXPECT_EQ(sources[i].kind, kinds[i].second) << kinds[i].first;
    }
  }
  EXPECT_EQ(named.count, 0);
  EXPECT_EQ(walked.count, 1);
  EXPECT_EQ(walked.first, dir_.path() / "kinds" / "g.json");
}

// A record may be passed over because of what it is, never because of what became of it.
TEST_F(Tokens, WhatTheReceiverRefusesIsNotPassedOver) {
  struct Refuses : DocumentSink {
    void begin_document(const std::string&) override {}
    void text(std::string_view) override { fail_input("here", "has no room"); }
    void end_document() override {}
    void tokens(const std::string&, std::span<const std::uint32_t>) override {}
    void skip(const io::Error&) override { ++skipped; }
    int skipped = 0;
  } sink;
  options_.skip_bad_records = true;
  write_file(dir_.path() / "a.jsonl", "junk\n{\"text\":\"a\"}\n");
  expect_refusal(ErrorKind::input, {"has no room"}, [&] {
    read_source({dir_.path() / "a.jsonl", SourceKind::jsonl}, options_, sink);
  });
  EXPECT_EQ(sink.skipped, 1);
}

}  // namespace
}  // namespace tierflow::testing

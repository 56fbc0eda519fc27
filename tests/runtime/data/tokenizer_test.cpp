#include <gtest/gtest.h>
#include <sys/wait.h>

#include <chrono>
#include <fstream>

#include "runtime/data/data.h"
#include "runtime/data/row_frames.h"
#include "runtime/data/tokenizer_process.h"
#include "support/temp_dir.h"
#include "tests/runtime/expect.h"

namespace tierflow {
namespace {

namespace fs = std::filesystem;
using testing::expect_refusal;
using testing::write_file;

constexpr const char* words_tokenizer =
    R"({"version":"1.0","truncation":{"max_length":2,"strategy":"LongestFirst","stride":0,"direction":"Right"},"padding":null,
    "added_tokens":[{"id":5,"content":"<eot>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}],
    "normalizer":null,"pre_tokenizer":{"type":"WhitespaceSplit"},"post_processor":null,"decoder":null,
    "model":{"type":"WordLevel","vocab":{"?":0,"a":1,"b":2,"c":3,"\u00e9":4,"<eot>":5},"unk_token":"?"}})";

class Tokenizer : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string check = std::string(TIERFLOW_TEST_PYTHON) + " -c 'import tokenizers' 2>/dev/null";
    if (std::system(check.c_str()) != 0) GTEST_SKIP() << "no Python with the package `tokenizers`";
    write_tokenizer(words_tokenizer);
    options_.paths = {dir_.path() / "data"};
    options_.python = TIERFLOW_TEST_PYTHON;
    options_.tokenizer = dir_.path() / "model" / "tokenizer.json";
    options_.cache = dir_.path() / "cache";
  }
  void write_tokenizer(std::string_view text) { write_file(dir_.path() / "model" / "tokenizer.json", text); }
  void write_data(const std::string& name, std::string_view bytes) { write_file(dir_.path() / "data" / name, bytes); }
  std::vector<std::int64_t> tokens() {
    const Dataset data = Dataset::prepare(options_);
    std::vector<std::int64_t> ids, sequence(2);
    options_.sequence_length = data.tokens();
    ids.resize(static_cast<std::size_t>(data.tokens()));
    Dataset::prepare(options_).training_sequence(0, ids);
    options_.sequence_length = 2;
    return ids;
  }

  testing::TempDir dir_;
  DataOptions options_{.vocab_size = 6, .sequence_length = 2, .held_out = 0};
};

using Ids = std::vector<std::int64_t>;

TEST_F(Tokenizer, TextBecomesTokensWithoutTruncation) {
  write_data("1.txt",
             "\xef\xbb\xbf"
             "a b  c\n\xc3\xa9 zzz\n");
  write_data("2.jsonl", "{\"text\":\"b\"}\n{\"text\":\"c c\"}\n");
  EXPECT_EQ(tokens(), (Ids{1, 2, 3, 4, 0, 2, 3, 3}));
}

TEST_F(Tokenizer, TheEndOfTextTokenComesFromTheFilesBesideIt) {
  write_data("1.txt", "a");
  write_data("2.txt", "");
  write_data("3.txt", "b c");
  write_file(dir_.path() / "model" / "config.json", R"({"eos_token_id":[3,4]})");
  EXPECT_EQ(tokens(), (Ids{1, 3, 2, 3}));  // the second ends with it
  write_file(dir_.path() / "model" / "tokenizer_config.json", R"({"eos_token":{"content":"<eot>"}})");
  EXPECT_EQ(tokens(), (Ids{1, 5, 2, 3, 5}));
}

TEST_F(Tokenizer, LongDocumentsAreCutBetweenWords) {
  std::string text, one_line;
  for (int i = 0; i < 900000; ++i) text += i % 1000 == 0 ? "b\n" : "a ";
  write_data("1.txt", text);
  write_file(dir_.path() / "model" / "tokenizer_config.json", R"({"eos_token":"<eot>"})");
  const Ids ids = tokens();
  EXPECT_EQ(ids.size(), 900001u);
  EXPECT_EQ(std::count(ids.begin(), ids.end(), 2), 900);
  EXPECT_EQ(std::count(ids.begin(), ids.end(), 5), 1);
  EXPECT_EQ(ids.back(), 5);
}

// A tokenizer is given a mebibyte at once at most: where a longer word is cut decides the tokens, which a run is gone
// on with.
TEST_F(Tokenizer, AWordLongerThanAPieceIsCutBetweenCharacters) {
  constexpr std::size_t kPiece = 1 << 20;
  write_file(dir_.path() / "model" / "tokenizer_config.json", R"({"eos_token":"<eot>"})");
  write_data("1.txt", std::string(kPiece, 'z'));
  EXPECT_EQ(tokens(), (Ids{0, 5}));
  write_data("1.txt", std::string(kPiece, 'z') + "a");
  EXPECT_EQ(tokens(), (Ids{0, 1, 5}));
  write_data("1.txt", std::string(kPiece - 1, 'z') + "\xc3\xa9");
  EXPECT_EQ(tokens(), (Ids{0, 4, 5}));
}

TEST_F(Tokenizer, TextThatIsNotUtf8) {
  write_data("1.txt", "a b c");
  write_data("2.txt", "a b \xff c");
  expect_refusal(io::ErrorKind::input, {"2.txt", "byte 4", "--on-bad-row skip"}, [&] { tokens(); });
  options_.skip_bad_records = true;
  EXPECT_EQ(tokens(), (Ids{1, 2, 3}));
  EXPECT_EQ(Dataset::prepare(options_).summaries().front().skipped, 1);
}

TEST_F(Tokenizer, IdsBeyondTheModelsVocabulary) {
  write_data("1.txt", "a \xc3\xa9");
  options_.vocab_size = 4;
  expect_refusal(io::ErrorKind::input, {"tokenizer.json", "token id 4", "vocabulary"}, [&] { tokens(); });
}

TEST_F(Tokenizer, HostileTokenizersGiveOneLine) {
  write_data("1.txt", "a b c");
  for (
      const char* bad :
      {"", "{}", "[]", "junk", "\x80\x04pickle",
       R"({"version":"1.0","model":{"type":"BPE","vocab":{},"merges":["a b"]}})",
       R"({"version":"1.0","model":{"type":"WordLevel","vocab":{"a":-1},"unk_token":"?"}})",
       R"({"version":"1.0","pre_tokenizer":{"type":"Split","pattern":{"Regex":"(((("},"behavior":"Isolated","invert":false},
                             "model":{"type":"WordLevel","vocab":{"a":0},"unk_token":"a"}})"}) {
    write_tokenizer(bad);
    expect_refusal(io::ErrorKind::input, {"tokenizer.json"}, [&] { tokens(); });
  }
  // No token for unknown words, and an unknown word.
  write_tokenizer(R"({"version":"1.0","model":{"type":"WordLevel","vocab":{"x":0},"unk_token":"?"}})");
  expect_refusal(io::ErrorKind::input, {"tokenizer.json", "fails on the text"}, [&] { tokens(); });
  fs::remove(options_.tokenizer);
  expect_refusal(io::ErrorKind::input, {"tokenizer.json"}, [&] { tokens(); });
}

TEST_F(Tokenizer, ARegexBombRunsIntoTheTimeLimit) {
  write_tokenizer(
      R"({"version":"1.0","added_tokens":[],"pre_tokenizer":{"type":"Split","pattern":{"Regex":"^(((((a|a?)+)+)+)+)+$"},
    "behavior":"Isolated","invert":false},"model":{"type":"WordLevel","vocab":{"a":0},"unk_token":"a"}})");
  write_data("1.txt", std::string(200, 'a').append("b"));
  options_.tokenizer_seconds = 2;
  const auto start = std::chrono::steady_clock::now();
  expect_refusal(io::ErrorKind::input, {"tokenizer.json"}, [&] { tokens(); });
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
}

TEST_F(Tokenizer, PythonMustBeThereWithItsPackage) {
  write_data("1.txt", "a b c");
  options_.python = "/nonexistent/python";
  expect_refusal(io::ErrorKind::environment, {"/nonexistent/python", "--python"}, [&] { tokens(); });
  options_.python = "/bin/true";
  expect_refusal(io::ErrorKind::environment, {"/bin/true"}, [&] { tokens(); });
  const fs::path lacking = dir_.path() / "python";
  write_file(lacking, "#!/bin/sh\nexec " TIERFLOW_TEST_PYTHON " -S \"$@\"\n");
  fs::permissions(lacking, fs::perms::owner_all);
  options_.python = lacking;
  expect_refusal(io::ErrorKind::environment, {"tokenizers", "pip install"}, [&] { tokens(); });
}

// What stands in Python's place here is a script of the shell.
class PythonProcesses : public ::testing::Test {
 protected:
  std::unique_ptr<PythonProcess> run(const std::string& script, double patience = 20) const {
    const fs::path python = dir_.path() / "python";
    write_file(python, "#!/bin/sh\n" + script + "\n");
    fs::permissions(python, fs::perms::owner_all);
    return std::make_unique<PythonProcess>(PythonProcess::Job{
        .script = "", .arguments = {}, .python = python, .path = "the folder", .package = "x", .patience = patience});
  }
  static std::string received(PythonProcess& process, std::size_t count) {
    std::string text(count, '.');
    process.receive(std::as_writable_bytes(std::span(text)));
    return text;
  }
  testing::TempDir dir_;
};

TEST_F(PythonProcesses, WhatIsSentIsAnsweredHoweverLate) {
  const auto echo = run("sleep 0.1; exec cat");
  const std::string text(100'000, 'x');
  echo->send(std::as_bytes(std::span(text)));
  EXPECT_EQ(received(*echo, text.size()), text);
}

TEST_F(PythonProcesses, SilenceEndsThem) {
  const auto silent = [&](const std::function<void(PythonProcess&)>& wait) {
    const auto process = run("exec sleep 5", 0.2);
    expect_refusal(io::ErrorKind::input, {"the folder", "silent for 0.2 s and was stopped"}, [&] { wait(*process); });
    EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1) << "it goes on";
  };
  silent([](PythonProcess& process) { received(process, 1); });
  silent([](PythonProcess& process) { process.send(std::vector<std::byte>(16 << 20)); });  // nobody takes them
}

TEST_F(PythonProcesses, HowTheyEndedIsTold) {
  for (const auto& [script, kind, words] :
       {std::tuple{"echo wrong >&2; exit 3", io::ErrorKind::input, "the folder: wrong"},
        {"printf 'first\\nlast\\n\\n' >&2; exit 3", io::ErrorKind::input, "the folder: last"},
        {"head -c 5000 /dev/zero >&2; echo >&2; echo last >&2; exit 3", io::ErrorKind::input, "the folder: last"},
        {"echo lacks >&2; exit 4", io::ErrorKind::environment, "python: lacks"},
        {"echo why >&2; exit 5", io::ErrorKind::environment, ") ended with status 5: why"},
        {"exit 0", io::ErrorKind::environment, ") ended with status 0: "},
        {"kill -TERM $$", io::ErrorKind::environment, ") was killed by signal 15: "},
        {"kill -KILL $$", io::ErrorKind::environment, ") was killed by signal 9 (out of memory?): "}})
    expect_refusal(kind, {words}, [&, script = script] { received(*run(script), 1); });
}

TEST_F(PythonProcesses, AFrameHasItsKindAndItsBytes) {
  const auto answer = [&](const std::string& bytes) {
    write_file(dir_.path() / "answer", bytes);
    return run("exec cat '" + (dir_.path() / "answer").string() + "'");
  };
  using std::string_literals::operator""s;
  const auto frames = answer("A\5\0\0\0helloB\0\0\0\0C\x2c\1\0\0"s + std::string(300, 'x'));
  for (const auto& [kind, text] : {std::pair{'A', "hello"s}, {'B', ""s}, {'C', std::string(300, 'x')}}) {
    const Frame frame = receive_frame(*frames);
    EXPECT_EQ(frame.kind, kind);
    EXPECT_EQ(std::string(reinterpret_cast<const char*>(frame.payload.data()), frame.payload.size()), text);
  }
  expect_refusal(io::ErrorKind::environment, {"ended with status 0"}, [&] { receive_frame(*frames); });
  const std::string failure = R"({"where": "a.jsonl:3", "why": "is no row"})";
  const auto failed = answer("F"s + static_cast<char>(failure.size()) + "\0\0\0"s + failure);
  expect_refusal(io::ErrorKind::input, {"a.jsonl:3: is no row"}, [&] { receive_frame(*failed); });
}

}  // namespace
}  // namespace tierflow

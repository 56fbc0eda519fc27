// The lowest layer of every parser: JSON fields at and beside their limits, and files that are not what they seem.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>

#include "runtime/base/edit_distance.h"
#include "runtime/base/files.h"
#include "runtime/base/strict_json.h"
#include "tests/runtime/expect.h"
#include "tests/support/child.h"
#include "tests/support/system_calls.h"
#include "tests/support/temp_dir.h"

namespace tierflow::testing {
namespace {

namespace fs = std::filesystem;
using io::ErrorKind;

Json json(const char* text) {
  return parse_json(text, "x.json");
}

void expect_no(const char* text, std::initializer_list<std::string_view> words,
               const std::function<void(const JsonFields&)>& read) {
  const Json object = json(text);
  SCOPED_TRACE(text);
  expect_refusal(ErrorKind::input, words, [&] { read(JsonFields(object, "x.json")); });
}

TEST(JsonFields, WhatIsAskedForIsKnownToWhoeverListens) {
  const Json object = json(R"({"a": 1, "b": 2, "c": 3})");
  const JsonFields fields(object, "x.json");
  fields.find("c");
  const FieldsAsked all;
  fields.integer("a", 0, 9);
  {
    const FieldsAsked some;
    fields.find("b");
    EXPECT_TRUE(some.has(object, "b"));
    EXPECT_FALSE(some.has(object, "a"));
  }
  fields.know({"d"});
  EXPECT_TRUE(all.has(object, "a") && all.has(object, "d"));
  EXPECT_FALSE(all.has(object, "b") || all.has(object, "c"));
}

TEST(TemporaryFolder, IsOneThatIsThere) {
  const testing::TempDir folder;
  std::ofstream(folder.path() / "file") << "x";
  const char* const before = std::getenv("TMPDIR");
  const std::string kept = before != nullptr ? before : "";
  for (const auto& [name, number] : {std::pair{"file", ENOTDIR}, {"nowhere", ENOENT}}) {
    setenv("TMPDIR", (folder.path() / name).c_str(), 1);
    try {
      temporary_folder();
      ADD_FAILURE() << name;
    } catch (const Exception& refused) {
      EXPECT_EQ(refused.error().error_number, number) << name;
    }
  }
  if (before != nullptr)
    setenv("TMPDIR", kept.c_str(), 1);
  else
    unsetenv("TMPDIR");
}

TEST(JsonFields, WholeNumbersAreHeldToTheirLimits) {
  const auto read = [](const char* text) {
    const Json object = json(text);
    return JsonFields(object, "x.json").integer("n", -3, 7);
  };
  EXPECT_EQ(read(R"({"n": -3})"), -3);
  EXPECT_EQ(read(R"({"n": 7})"), 7);
  EXPECT_EQ(read(R"({"n": 4.0})"), 4);
  const auto within = [](const JsonFields& fields) { fields.integer("n", -3, 7); };
  expect_no(R"({"n": -4})", {"x.json", "n is -4", "between -3 and 7"}, within);
  expect_no(R"({"n": 8})", {"n is 8", "between -3 and 7"}, within);
  expect_no(R"({"n": 8.0})", {"n is 8.0", "between -3 and 7"}, within);
  expect_no(R"({"n": 4.5})", {"n is 4.5", "whole number"}, within);
  expect_no(R"({"n": "4"})", {"n is \"4\"", "whole number"}, within);
  expect_no(R"({"n": true})", {"n is true", "whole number"}, within);
  expect_no(R"({"n": [4]})", {"n is [4]", "whole number"}, within);
  expect_no(R"({"n": null})", {"n is missing"}, within);
  expect_no(R"({"m": 4})", {"n is missing"}, within);
}

TEST(JsonFields, LargeNumbersAreExactOrRefused) {
  const auto read = [](const char* text) {
    const Json object = json(text);
    return JsonFields(object, "x.json").integer("n", INT64_MIN, INT64_MAX);
  };
  EXPECT_EQ(read(R"({"n": 9223372036854775807})"), INT64_MAX);
  EXPECT_EQ(read(R"({"n": -9223372036854775808})"), INT64_MIN);
  EXPECT_EQ(read(R"({"n": 9007199254740991.0})"), (1LL << 53) - 1);
  EXPECT_EQ(read(R"({"n": -9007199254740991.0})"), 1 - (1LL << 53));
  const auto any = [](const JsonFields& fields) { fields.integer("n", INT64_MIN, INT64_MAX); };
  expect_no(R"({"n": 9223372036854775808})", {"9223372036854775808", "must be between"}, any);
  expect_no(R"({"n": 18446744073709551615})", {"18446744073709551615", "must be between"}, any);
  expect_no(R"({"n": 9007199254740992.0})", {"whole number"}, any);  // could be its neighbour
  expect_no(R"({"n": -9007199254740992.0})", {"whole number"}, any);
  expect_no(R"({"n": 1e300})", {"whole number"}, any);
}

TEST(JsonFields, WhatIsAbsentOrNullHasItsFallbackAndNothingElse) {
  const Json object = json(R"({"null": null, "i": 5, "x": 0.5, "yes": true, "no": false, "s": "text", "empty": ""})");
  const JsonFields fields(object, "x.json");
  EXPECT_EQ(fields.where(), "x.json");
  EXPECT_EQ(fields.find("absent"), nullptr);
  EXPECT_EQ(fields.find("null"), nullptr);
  EXPECT_EQ(*fields.find("i"), 5);
  for (const char* name : {"absent", "null"}) {
    EXPECT_EQ(fields.integer_or(name, 99, 0, 9), 99);  // the program's own: not held to the limits of the file's
    EXPECT_EQ(fields.number_or(name, 2.5, 0, 1), 2.5);
    EXPECT_TRUE(fields.boolean_or(name, true));
    EXPECT_FALSE(fields.boolean_or(name, false));
    EXPECT_EQ(fields.text_or(name, "other"), "other");
  }
  EXPECT_EQ(fields.integer_or("i", 99, 5, 5), 5);
  EXPECT_EQ(fields.number_or("x", 2, 0.5, 0.5), 0.5);
  EXPECT_EQ(fields.number_or("i", 2, 0, 9), 5.0);
  EXPECT_TRUE(fields.boolean_or("yes", false));
  EXPECT_FALSE(fields.boolean_or("no", true));
  EXPECT_EQ(fields.text_or("s", "other"), "text");
  EXPECT_EQ(fields.text_or("empty", "other"), "");
}

TEST(JsonFields, WrongKindsAreNamed) {
  expect_no(R"({"n": 6})", {"n is 6", "between 0 and 5"}, [](const auto& f) { f.integer_or("n", 1, 0, 5); });
  expect_no(R"({"n": 0.49})", {"n is 0.49", "between 0.5 and 1"}, [](const auto& f) { f.number_or("n", 1, 0.5, 1); });
  expect_no(R"({"n": 1.01})", {"n is 1.01", "between 0.5 and 1"}, [](const auto& f) { f.number_or("n", 1, 0.5, 1); });
  expect_no(R"({"n": "1"})", {"n is \"1\"", "must be a number"}, [](const auto& f) { f.number_or("n", 1, 0, 1); });
  expect_no(R"({"n": true})", {"n is true", "must be a number"}, [](const auto& f) { f.number_or("n", 1, 0, 1); });
  expect_no(R"({"n": 1})", {"n is 1", "true or false"}, [](const auto& f) { f.boolean_or("n", true); });
  expect_no(R"({"n": "yes"})", {"n is \"yes\"", "true or false"}, [](const auto& f) { f.boolean_or("n", true); });
  expect_no(R"({"n": 1})", {"n is 1", "must be a string"}, [](const auto& f) { f.text_or("n", ""); });
  expect_no(R"({"n": {}})", {"n is {}", "must be a string"}, [](const auto& f) { f.text_or("n", ""); });
  expect_no(R"({})", {"x.json", "n is odd"}, [](const auto& f) { f.fail("n", "is odd"); });
}

TEST(StrictJson, NestsSoDeepAndNoDeeper) {
  const auto nested = [](int levels) { return std::string(levels, '[') + std::string(levels, ']'); };
  EXPECT_NO_THROW(parse_json(nested(32), "x"));
  expect_refusal(ErrorKind::input, {"x", "deeper than 32 levels"}, [&] { parse_json(nested(34), "x"); });
  EXPECT_NO_THROW(parse_json(nested(3), "x", 3));
  expect_refusal(ErrorKind::input, {"deeper than 3 levels"}, [&] { parse_json(nested(5), "x", 3); });
}

TEST(StrictJson, ANameComesOnceInAnObject) {
  EXPECT_NO_THROW(json(R"({"a": {"a": 1}, "b": {"a": 2}, "c": [{"a": 3}, {"a": 4}]})"));
  for (const char* text : {R"({"a": 1, "a": 1})", R"({"b": {"a": 1, "c": 2, "a": 3}})", R"({"a": {"b": 1}, "a": 2})",
                           R"([{"a": 1}, {"a": 1, "a": 2}])"})
    expect_refusal(ErrorKind::input, {"x.json", "the name \"a\" twice"}, [&] { json(text); });
}

TEST(StrictJson, SaysWhatIsWrongInPlainWords) {
  using std::string_view_literals::operator""sv;
  expect_refusal(ErrorKind::input, {"x", "zero byte"}, [] { parse_json("{}\0{}"sv, "x"); });
  for (const char* text : {"", "{", "[1,]", "{\"a\" 1}", "nan", "{} {}", "{\"a\": 1e999}", "\"\xff\""})
    expect_refusal(ErrorKind::input, {"x.json", "is not valid JSON: "}, [&] { json(text); });
  expect_refusal(ErrorKind::input, {"x.json", "is not valid JSON: at column 4: "}, [] { json("[1,]"); });
  expect_refusal(ErrorKind::input, {"x.json", "is not valid JSON: parse error at line 2, column 1: "},
                 [] { json("[1,\n]"); });
  try {
    json("[1,]");
  } catch (const Exception& error) {
    EXPECT_EQ(std::string(error.what()).find("json.exception"), std::string::npos) << error.what();
  }
}

TEST(EditDistance, CountsSwapsOfNeighboursOnce) {
  for (const auto& [a, b, distance] : {std::tuple{"", "", 0},
                                       {"", "abc", 3},
                                       {"abc", "abc", 0},
                                       {"abc", "abd", 1},
                                       {"abc", "ac", 1},
                                       {"ab", "ba", 1},
                                       {"abcd", "abdc", 1},
                                       {"abcdefgh", "bacdefhg", 2},
                                       {"abcd", "dcba", 3},
                                       {"kitten", "sitting", 3},
                                       {"lr-schedule", "lr-shcedule", 1}}) {
    EXPECT_EQ(edit_distance(a, b), static_cast<std::size_t>(distance)) << a << " " << b;
    EXPECT_EQ(edit_distance(b, a), static_cast<std::size_t>(distance)) << b << " " << a;
  }
}

TEST(Printable, IsOneLineOfAscii) {
  EXPECT_EQ(printable("a\x1f b\x7f~\n\xc3\xa9"), "a? b?~???");
  EXPECT_EQ(printable("12345", 5), "12345");
  EXPECT_EQ(printable("123456", 5), "12345...");
  EXPECT_EQ(printable(""), "");
}

TEST(ForeignFiles, AreKnownByTheirFirstBytes) {
  using std::string_view_literals::operator""sv;
  const auto describe = [](std::string_view head) { return describe_foreign(std::as_bytes(std::span(head))); };
  for (const auto& [head, words] : {std::pair{"PK\x03\x04rest"sv, "a zip archive"},
                                    {"\x80\x02"sv, "a pickle"},
                                    {"\x80\x05xyz"sv, "a pickle"},
                                    {"GGUF"sv, "a GGUF file"},
                                    {"version https://git-lfs.github.com/spec/v1"sv, "git lfs pull"},
                                    {"<!DOCTYPE html>"sv, "an HTML page"},
                                    {"<!doctype html>"sv, "an HTML page"},
                                    {"<html>"sv, "an HTML page"},
                                    {"<HTML>"sv, "an HTML page"},
                                    {"\x89HDF"sv, "an HDF5 file"},
                                    {"\x1f\x8b\x08"sv, "a gzip archive"},
                                    {"\x93NUMPY"sv, "a NumPy array"}})
    EXPECT_NE(describe(head).find(words), std::string::npos) << head << ": " << describe(head);
  for (const auto head : {""sv, "\x80"sv, "\x80\x01"sv, "\x80\x06"sv, "PK"sv, "a GGUF"sv, "\x79\x02"sv})
    EXPECT_EQ(describe(head), "") << head;
}

class Files : public ::testing::Test {
 protected:
  fs::path file(const char* name, std::string_view bytes) {
    write_file(folder_.path() / name, bytes);
    return folder_.path() / name;
  }
  TempDir folder_;
};

TEST_F(Files, OnlyARegularFileOpens) {
  EXPECT_TRUE(open_regular(file("plain", "text")));
  expect_refusal(ErrorKind::input, {"gone", "open"}, [&] { open_regular(folder_.path() / "gone"); });
  expect_refusal(ErrorKind::input, {"is a folder"}, [&] { open_regular(folder_.path()); });
  ASSERT_EQ(mkfifo((folder_.path() / "pipe").c_str(), 0600), 0);
  expect_refusal(ErrorKind::input, {"pipe", "not a regular file"}, [&] { open_regular(folder_.path() / "pipe"); });
}

TEST_F(Files, NothingIsOpenedOutsideItsFolder) {
  file("secret", "x");
  const fs::path model = folder_.path() / "model";
  write_file(model / "config.json", "inside");
  EXPECT_EQ(read_text(open_beneath(model, "config.json"), "config.json", 100), "inside");
  using std::string_literals::operator""s;
  for (const std::string& name : {""s, "."s, ".."s, "../secret"s, "a/b"s, "config.json/"s, "config.json\0"s})
    expect_refusal(ErrorKind::input, {model.string(), "not a plain name"}, [&] { open_beneath(model, name); });
  fs::create_symlink("config.json", model / "same");
  EXPECT_TRUE(open_beneath(model, "same"));
  fs::create_symlink("../secret", model / "out");
  fs::create_symlink(folder_.path() / "secret", model / "absolute");
  for (const char* name : {"out", "absolute"})
    expect_refusal(ErrorKind::input, {name, "leads out of its folder"}, [&] { open_beneath(model, name); });
  expect_refusal(ErrorKind::input, {"gone"}, [&] { open_beneath(model, "gone"); });
  expect_refusal(ErrorKind::input, {"nowhere"}, [&] { open_beneath(folder_.path() / "nowhere", "config.json"); });
  fs::create_directory(model / "sub");
  expect_refusal(ErrorKind::input, {"sub", "is a folder"}, [&] { open_beneath(model, "sub"); });
}

TEST_F(Files, ReadsExactlyOrSaysWhereTheFileEnded) {
  const fs::path path = file("ten", "0123456789");
  const File ten = open_regular(path);
  EXPECT_EQ(file_size(ten, path), 10U);
  std::string got(4, '.');
  read_exactly(ten, path, 6, std::as_writable_bytes(std::span(got)));
  EXPECT_EQ(got, "6789");
  try {
    read_exactly(ten, path, 7, std::as_writable_bytes(std::span(got)));
    FAIL() << "the file is shorter";
  } catch (const Exception& error) {
    EXPECT_EQ(error.error().kind, ErrorKind::corruption);
    EXPECT_EQ(error.error().operation, "read");
    EXPECT_EQ(error.error().path, path.string());
    EXPECT_EQ(error.error().offset, 10U);
    EXPECT_EQ(error.error().length, 1U);
    EXPECT_EQ(error.error().error_number, 0);
  }
  EXPECT_EQ(read_text(path, 10), "0123456789");
  expect_refusal(ErrorKind::input, {"ten", "10 bytes long", "more than the 9"}, [&] { read_text(path, 9); });
}

TEST_F(Files, TextIsReplacedWholeOrNotAtAll) {
  const fs::path path = folder_.path() / "log.json";
  write_text(path, "first, which is longer");
  write_text(path, "second");
  EXPECT_EQ(read_text(path, 100), "second");
  EXPECT_FALSE(fs::exists(path.string() + ".partial"));
  fs::create_directory(folder_.path() / "folder");
  expect_refusal(ErrorKind::input, {"rename", "folder"}, [&] { write_text(folder_.path() / "folder", "text"); });
  EXPECT_FALSE(fs::exists(folder_.path() / "folder.partial"));
  fs::create_symlink(path, folder_.path() / "linked.partial");
  expect_refusal(ErrorKind::input, {"create", "linked.partial"}, [&] { write_text(folder_.path() / "linked", "x"); });
  EXPECT_EQ(read_text(path, 100), "second");
  const File full(open("/dev/full", O_WRONLY | O_CLOEXEC));
  expect_refusal(ErrorKind::environment, {"write", "full"},
                 [&] { write_exactly(full, "full", std::as_bytes(std::span(std::string_view("text")))); });
}

// What cannot be flushed gets no name, and what had the name stays.
TEST_F(Files, NothingUnflushedGetsItsName) {
  const fs::path path = file("log.json", "first");
  {
    const SystemCalls calls(failing("fsync", EIO));
    expect_refusal(ErrorKind::io, {"flush", "log.json"}, [&] { write_text(path, "second"); });
    const File nameless = create_nameless(folder_.path());
    expect_refusal(ErrorKind::io, {"flush", "log.json"}, [&] { name_file(nameless, path); });
    expect_refusal(ErrorKind::io, {"flush", folder_.path().string()}, [&] { sync_folder(folder_.path()); });
  }
  EXPECT_EQ(read_text(path, 100), "first");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_.path()), {}), 1);
}

// Its own bytes, or where a name that is gone does not come back (as here after a failure), a copy.
TEST_F(Files, ANamelessFileGetsItsNameOrLeavesNone) {
  const fs::path path = folder_.path() / "result";
  const auto entries = [&] { return std::distance(fs::directory_iterator(folder_.path()), {}); };
  const auto named = [&](const File& nameless) {
    const SystemCalls calls;
    name_file(nameless, path);
    std::vector<std::string> flushed;
    for (const SystemCall& call : calls.seen())
      if (call.name == "fsync") flushed.push_back(call.path);
    ASSERT_GE(flushed.size(), 2u);
    EXPECT_EQ(flushed.back(), folder_.path()) << "the name is flushed, and last";
  };
  const auto written = [&](std::string_view text) {
    File nameless = create_nameless(folder_.path());
    write_exactly(nameless, path, std::as_bytes(std::span(text)));
    return nameless;
  };
  const File one = written("one"), two = written("two");
  EXPECT_EQ(entries(), 0);
  fs::create_directory(path);
  for (int time = 0; time < 2; ++time) {
    expect_refusal(ErrorKind::input, {"rename", "result"}, [&] { name_file(one, path); });
    EXPECT_EQ(entries(), 1) << "under another name";
  }
  fs::remove(path);
  named(one);
  EXPECT_EQ(read_text(path, 100), "one");
  named(two);
  EXPECT_EQ(read_text(path, 100), "two");
  EXPECT_EQ(entries(), 1);
}

// $XDG_CACHE_HOME, else below $HOME; paths that are not absolute count for nothing.
TEST(CacheFolder, IsWhereTheUserHasIt) {
  for (const auto& [xdg, home, expected] : {std::tuple{"/x", "/me", "/x/tierflow"},
                                            {"", "/me", "/me/.cache/tierflow"},
                                            {"x", "/me", "/me/.cache/tierflow"},
                                            {"", "me", ""},
                                            {"", "", ""}})
    EXPECT_EQ(in_child([&, xdg = xdg, home = home, expected = expected] {
                setenv("XDG_CACHE_HOME", xdg, 1);
                setenv("HOME", home, 1);
                return cache_folder() == expected ? 0 : 1;
              }),
              0)
        << expected;
  EXPECT_EQ(in_child([] {
              unsetenv("XDG_CACHE_HOME");
              setenv("HOME", "/me", 1);
              const bool below_home = cache_folder() == "/me/.cache/tierflow";
              unsetenv("HOME");
              return below_home && cache_folder().empty() ? 0 : 1;
            }),
            0);
}

TEST_F(Files, FoldersAreMadeAndOnlyOnesOwnAreRemoved) {
  const fs::path here = folder_.path() / "here";
  fs::create_directory(here);
  {
    const BorrowedFolder made(here / "a/b");
    EXPECT_TRUE(fs::is_directory(here / "a/b"));
  }
  EXPECT_FALSE(fs::exists(here / "a"));
  EXPECT_TRUE(fs::is_directory(here));
  {
    const BorrowedFolder made(here / "c/d/");
    write_file(here / "c/kept", "x");
  }
  EXPECT_FALSE(fs::exists(here / "c/d"));
  EXPECT_TRUE(fs::exists(here / "c/kept"));
  make_folder(here);  // that it is there already is no error
  expect_refusal(ErrorKind::input, {"kept"}, [&] { make_folder(here / "c/kept"); });
  sync_folder(here);
}

TEST(SystemErrors, HaveTheKindThatTheExitCodeTells) {
  const auto kind = [](int number) {
    try {
      fail_system("open", "x", number);
    } catch (const Exception& error) {
      EXPECT_EQ(error.error().operation, "open");
      EXPECT_EQ(error.error().path, "x");
      EXPECT_EQ(error.error().error_number, number);
      return error.error().kind;
    }
  };
  for (const int number : {ENOSPC, EDQUOT, EROFS, EACCES, EPERM, EMFILE, ENFILE, EAGAIN})
    EXPECT_EQ(kind(number), ErrorKind::environment) << number;
  for (const int number : {ENOENT, ENOTDIR, EISDIR, ELOOP, ENAMETOOLONG, EXDEV, ENXIO})
    EXPECT_EQ(kind(number), ErrorKind::input) << number;
  EXPECT_EQ(kind(ENOMEM), ErrorKind::memory);
  for (const int number : {EIO, ENODEV, EBADF}) EXPECT_EQ(kind(number), ErrorKind::io) << number;
}

}  // namespace
}  // namespace tierflow::testing

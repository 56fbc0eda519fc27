// Pairs of answers: in every order together, and only where a loss of pairs takes them.
#include <set>

#include "runtime/data/row_format.h"
#include "tests/runtime/data/rows_fixture.h"
#include "tests/runtime/expect.h"

namespace tierflow::testing {
namespace {

TEST_F(Rows, PairsStayTogetherInEveryOrder) {
  std::vector<Row> rows;
  for (std::uint32_t n = 0; n < 40; ++n) rows.push_back(row(10 + 10 * n, 3 + n % 3));
  rows[6].assign(9, 70);  // nothing to train on within the length: its pair is left out
  rows[6].back() |= T;
  options_.paths = {write("a.tfd", rows, kNotes, true)};
  options_.pairs = Pairs::only;
  options_.held_out = 0.2;
  const Dataset data = prepare("auto");
  EXPECT_TRUE(data.pairs());
  EXPECT_FALSE(data.isolated());
  EXPECT_EQ(data.all_sequences(), 38);
  EXPECT_EQ(data.held_out_sequences(), 8);
  ASSERT_EQ(data.training_sequences(), 30);
  EXPECT_EQ(data.summaries()[0].rows->examples, 20);
  EXPECT_EQ(data.summaries()[0].rows->untrained_when_cut, 1);
  std::set<std::int64_t> seen;
  const auto look = [&](std::int64_t index, bool held_out) {
    const std::int64_t first = sequence(data, index, held_out).ids[0],
                       second = sequence(data, index + 1, held_out).ids[0];
    EXPECT_EQ(first % 20, 10);
    EXPECT_EQ(second, first + 10);
    const auto number = held_out ? &Dataset::number_of_held_out : &Dataset::number_of_training;
    for (const std::int64_t k : {0, 1}) {
      Ids ids(8);
      data.numbered_sequence((data.*number)(index + k), ids);
      EXPECT_EQ(ids[0], first + 10 * k);
    }
    return first;
  };
  for (std::int64_t i = 0; i < 8; i += 2) EXPECT_TRUE(seen.insert(look(i, true)).second);
  std::vector<std::int64_t> orders[2];
  for (std::int64_t i = 0; i < 60; i += 2) orders[i / 30].push_back(look(i, false));
  EXPECT_NE(orders[0], orders[1]);  // each epoch has its own
  for (const std::int64_t first : orders[0]) EXPECT_TRUE(seen.insert(first).second);
  EXPECT_EQ(seen.size(), 19u);
  EXPECT_EQ(std::set(orders[0].begin(), orders[0].end()), std::set(orders[1].begin(), orders[1].end()));
  // Mixed with others they are units too, and only with other pairs.
  options_.paths.push_back(write("b.tfd", {row(801, 4), row(811, 4), row(821, 4), row(831, 4)}, kNotes, true));
  options_.weights = {0.5, 0.5};
  const Dataset mixed = prepare("none");
  for (std::int64_t i = 0; i < mixed.training_sequences(); i += 2) {
    EXPECT_EQ(sequence(mixed, i + 1).ids[0], sequence(mixed, i).ids[0] + 10);
    Ids ids(8);
    mixed.numbered_sequence(mixed.number_of_training(i), ids);
    EXPECT_EQ(ids, sequence(mixed, i).ids);
  }
}

TEST_F(Rows, PairsAreForALossOfPairsAlone) {
  const fs::path pairs = write("a.tfd", {row(10, 4), row(20, 4)}, kNotes, true),
                 plain = write("b.tfd", {row(10, 4), row(20, 4)});
  const auto refused = [&](const char* packing, std::initializer_list<std::string_view> words,
                           io::ErrorKind kind = io::ErrorKind::usage) {
    expect_refusal(kind, words, [&] { prepare(packing); });
  };
  options_.paths = {pairs};
  refused("auto", {"a.tfd", "holds pairs", "--loss dpo, simpo or orpo"});
  options_.pairs = Pairs::either;
  const std::uint64_t fingerprint = prepare("auto").fingerprint();
  EXPECT_EQ(prepare("none").fingerprint(), fingerprint);
  for (const char* packing : {"bfd", "concat"}) refused(packing, {"a.tfd", "leave --packing out"});
  options_.train_on = "all";
  refused("auto", {"a.tfd", "leave --train-on out"});
  options_.train_on = "assistant";
  options_.paths = {plain};
  EXPECT_NE(prepare("none").fingerprint(), fingerprint);
  options_.pairs = Pairs::only;
  refused("auto", {"b.tfd", "holds no pairs"});
  options_.pairs = Pairs::either;
  options_.paths = {pairs, plain};
  options_.weights = {1, 1};
  refused("auto", {"b.tfd", "is mixed with other data", "pairs stand alone"}, io::ErrorKind::input);
  expect_refusal(io::ErrorKind::corruption, {"c.tfd", "pairs with an odd number of rows"},
                 [&] { const RowFile half(write("c.tfd", {row(10, 4)}, kNotes, true)); });
}

TEST_F(Rows, TheFirstRowTellsTheFormat) {
  const auto format = [&](const std::string& rows) {
    write_file(dir_.path() / "a.jsonl", rows);
    return row_format(dir_.path() / "a.jsonl", options_);
  };
  for (const char* named : {"alpaca", "messages", "text"}) {  // unless somebody says it
    options_.format = named;
    EXPECT_EQ(format(R"({"prompt":"p","completion":"c"})"), named);
  }
  options_.format = "auto";
  const char* const all = R"({"chosen":"a","rejected":"b","text":"t","messages":[],"conversations":[],"prompt":"p",
                              "completion":"c","instruction":"i","output":"o","input_ids":[1]})";
  std::string one_line = all;
  std::erase(one_line, '\n');
  for (const auto& [row, expected] : {std::pair{R"({"text":"t"})", "text"},
                                      {one_line.c_str(), "text"},
                                      {R"({"text":7,"input_ids":[1]})", "tokens"},
                                      {R"({"messages":[],"prompt":"p","completion":"c"})", "messages"},
                                      {R"({"messages":"m"})", "text"},
                                      {R"({"messages":null,"conversations":[]})", "sharegpt"},
                                      {R"({"prompt":"p","completion":"c"})", "prompt-completion"},
                                      {R"({"prompt":"p","completion":null})", "text"},
                                      {R"({"prompt":"p"})", "text"},
                                      {R"({"instruction":"i","output":"o"})", "alpaca"},
                                      {R"({"instruction":"i"})", "text"},
                                      {R"({"chosen":"a","rejected":"b","instruction":"i","output":"o"})", "alpaca"},
                                      {R"({"chosen":"a","rejected":"b"})", "preference"},
                                      {R"({"chosen":"a"})", "text"},
                                      {"\n \t\r\n{\"messages\":[]}\n{\"input_ids\":[]}", "messages"},
                                      {"", "text"}})
    EXPECT_EQ(format(row), expected) << row;
  options_.pairs = Pairs::only;
  EXPECT_EQ(format(one_line), "preference");
  options_.pairs = Pairs::none;
  options_.jsonl_field = "body";
  EXPECT_EQ(format(R"({"text":"t","messages":[]})"), "messages");
  EXPECT_EQ(format(R"({"body":"t","messages":[]})"), "text");
  // What is not known is the first row's, or passed over, as far as a thousand rows.
  const std::string row = "{\"messages\":[]}\n";
  const auto junk = [](int rows) {
    std::string text;
    for (int i = 0; i < rows; ++i) text += i % 2 == 0 ? "junk\n" : "\n{}\n";
    return text;
  };
  EXPECT_EQ(format(junk(1) + row), "text");
  expect_refusal(io::ErrorKind::input, {":2: begins a JSON array"}, [&] { format("\n [\n" + row + "]\n"); });
  options_.skip_bad_records = true;
  EXPECT_EQ(format(junk(999) + row), "messages");
  EXPECT_EQ(format(junk(1000) + row), "text");
  options_.format = "alpaca";
  EXPECT_EQ(format(row), "alpaca");
}

TEST_F(Rows, FilesThatDoNotGoTogetherAreRefused) {
  const auto refused = [&](const std::vector<std::string>& names, std::initializer_list<std::string_view> words) {
    options_.paths.clear();
    for (const std::string& name : names) options_.paths.push_back(dir_.path() / name);
    expect_refusal(io::ErrorKind::input, words, [&] { prepare("auto"); });
  };
  write_file(dir_.path() / "rows.jsonl", R"({"messages":[]})");
  write_file(dir_.path() / "pairs.jsonl", R"({"chosen":"a","rejected":"b"})");
  write_file(dir_.path() / "text.txt", "text");
  write("rows.tfd", {row(10, 4)});
  refused({"rows.jsonl", "text.txt"}, {"text.txt", "is no .jsonl file", "--data-weights"});
  refused({"rows.jsonl", "pairs.jsonl"}, {"rows.jsonl", "stands beside other data", "pairs stand alone"});
  refused({"text.txt", "rows.tfd"}, {"text.txt", "name prepared .tfd files apart"});
}

}  // namespace
}  // namespace tierflow::testing

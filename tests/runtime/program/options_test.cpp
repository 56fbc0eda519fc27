#include "runtime/program/options.h"

#include <gtest/gtest.h>

#include <sstream>

#include "runtime/base/machine.h"
#include "runtime/base/terminal.h"
#include "runtime/program/option_values.h"
#include "support/temp_dir.h"
#include "tests/runtime/expect.h"

namespace tierflow {
namespace {

using testing::expect_refusal;
using testing::write_file;
using Words = std::vector<std::string>;

Words operator+(Words words, const Words& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}
const Words needed = {"--model", "m", "--data", "a", "b", "--out", "o"};

void refused(const Words& words, std::initializer_list<std::string_view> texts) {
  expect_refusal(io::ErrorKind::usage, texts, [&] { parse_train(needed + words); });
}

TEST(Options, SizesAreReadExactly) {
  EXPECT_EQ(parse_bytes("0", "x"), 0u);
  EXPECT_EQ(parse_bytes("512", "x"), 512u);
  EXPECT_EQ(parse_bytes("20GiB", "x"), std::uint64_t{20} << 30);
  EXPECT_EQ(parse_bytes("512 mib", "x"), std::uint64_t{512} << 20);
  EXPECT_EQ(parse_bytes("1.5G", "x"), std::uint64_t{3} << 29);
  EXPECT_EQ(parse_bytes("3GB", "x"), 3000000000u);
  for (const char* bad : {"", "GiB", "-1", "1XiB", "1e400", "nan", "inf", "99999999TiB", "1 2", "0x10"})
    expect_refusal(io::ErrorKind::usage, {"--x", "512MiB"}, [&] { parse_bytes(bad, "x"); });
  for (const std::uint64_t bytes : {std::uint64_t{1}, std::uint64_t{1000}, std::uint64_t{3} << 29,
                                    std::uint64_t{7} << 40, (std::uint64_t{1} << 50) + 1})
    EXPECT_EQ(parse_bytes(format_bytes(bytes), "x"), bytes);
}

TEST(Options, TheWholeCommandLine) {
  const TrainOptions o = parse_train(needed + Words{"--device",
                                                    "cpu",
                                                    "--device-memory",
                                                    "2GiB",
                                                    "--host-memory=512MiB",
                                                    "--storage",
                                                    "/a,/b",
                                                    "--sequence-length",
                                                    "128",
                                                    "--micro-batch",
                                                    "2",
                                                    "--micro-batches",
                                                    "4",
                                                    "--steps",
                                                    "10",
                                                    "--lr",
                                                    "3e-4",
                                                    "--lr-schedule",
                                                    "linear",
                                                    "--warmup",
                                                    "5",
                                                    "--weight-decay",
                                                    "0.1",
                                                    "--betas",
                                                    "0.9,0.95",
                                                    "--eps",
                                                    "1e-6",
                                                    "--clip",
                                                    "none",
                                                    "--seed",
                                                    "18446744073709551615",
                                                    "--json",
                                                    "--durability",
                                                    "export-only"});
  EXPECT_EQ(o.data.size(), 2u);
  EXPECT_EQ(o.device_memory, std::uint64_t{2} << 30);
  EXPECT_EQ(o.host_memory, std::uint64_t{512} << 20);
  EXPECT_EQ(o.storage, (std::vector<std::filesystem::path>{"/a", "/b"}));
  EXPECT_EQ(o.beta2, 0.95);
  EXPECT_FALSE(o.clip);
  EXPECT_EQ(o.seed, UINT64_MAX);
  EXPECT_TRUE(o.json);
  EXPECT_EQ(parse_train(needed).epochs, 1);
  EXPECT_EQ(parse_train(needed + Words{"--betas", "0.8", "0.9"}).beta1, 0.8);
}

TEST(Options, BadWordsGetOneLineAndTheNearestName) {
  refused({"--lr-shedule", "linear"}, {"--lr-shedule", "did you mean --lr-schedule?"});
  refused({"--sequence", "8"}, {"--sequence", "did you mean --sequence-length?"});
  refused({"--sequence_length=8"}, {"did you mean --sequence-length?"});
  refused({"--per_device_train_batch_size", "2"}, {"here it is --micro-batch"});
  refused({"--gradient-accumulation-steps=2"}, {"here it is --micro-batches"});
  refused({"--host-memory", "48"}, {"--host-memory", "48 bytes", "48GiB"});
  refused({"--zzzzzzzz"}, {"unknown option --zzzzzzzz"});
  refused({"--json", "stray"}, {"stray"});
  refused({"--lr", "x"}, {"--lr", "\"x\""});
  refused({"--lr", "nan"}, {"--lr"});
  refused({"--lr", "-0.5"}, {"--lr is -0.5; it must be at least 0 and below 1e6"});
  refused({"--lr", "1000000"}, {"--lr is 1000000;"});
  refused({"--lr", "1,5"}, {"--lr"});
  refused({"--steps", "-3"}, {"--steps"});
  refused({"--steps", "99999999999999999999"}, {"--steps"});
  refused({"--micro-batch", "0"}, {"--micro-batch", "between 1"});
  refused({"--betas", "0.9"}, {"--betas", "2 values"});
  refused({"--betas", "0.9,1"}, {"--betas"});
  refused({"--clip", "0"}, {"--clip"});
  refused({"--device", "tpu"}, {"tpu", "auto, cpu, cuda"});
  refused({"--precision", "fp8"}, {"fp8", "fp32-master+adam8"});
  refused({"--steps", "1", "--epochs", "1"}, {"not both"});
  refused({"--config", "c"}, {"either --model or --config"});
  refused({"--storage", "a,a"}, {"--storage", "a twice"});
  refused({"--storage", "st", "./st"}, {"one folder twice", "st and ./st"});
  refused({"--storage", "b,st/,x/../st"}, {"one folder twice", "st/ and x/../st"});
  EXPECT_EQ(parse_train(needed + Words{"--storage", "st,st2"}).storage.size(), 2u);
  refused({"--host-memory", "0"}, {"--host-memory is 0", "auto"});
  refused({"--device-memory", "0MiB"}, {"--device-memory is 0MiB", "auto"});
  refused({"--device-memory", "0.1"}, {"--device-memory"});
  EXPECT_EQ(parse_train(needed + Words{"--host-memory", "auto"}).host_memory, 0u);
  refused({"--threads", "1000"}, {"--threads is 1000", "CPUs", "at most"});
  EXPECT_EQ(parse_train(needed + Words{"--threads", "64"}).threads, 64);
  refused({"--micro-batch", "99999999999"}, {"--micro-batch is 99999999999", "between 1 and 2147483648"});
  refused({"--micro-batches", "1000000000000"}, {"--micro-batches is 1000000000000", "2147483648"});
  refused({"--micro-batches", "2147483648", "--sequence-length", "2147483648", "--micro-batch", "2147483648"},
          {"2^31 tokens", "--micro-batch 2147483648"});
  refused({"--micro-batch", "4194305"}, {"2^31 tokens"});
  EXPECT_EQ(parse_train(needed + Words{"--micro-batch", "4194304"}).micro_batch, 4194304);
  refused({"--micro-batches", "4194305"}, {"--micro-batches 4194305", "2^31 tokens"});
  for (const char* option : {"--model", "--out", "--data", "--storage", "--tokenizer", "--log-json"})
    expect_refusal(io::ErrorKind::usage, {option, "not UTF-8 from byte 2 on", "/?x"}, [&] {
      parse_train(Words{option, "a/\xe9x"});
    });
  refused({"--no-export"}, {"--storage"});
  refused({"--lr", "1", "--lr", "2"}, {"--lr"});
  expect_refusal(io::ErrorKind::usage, {"--data"}, [] { parse_train({"--model", "m", "--out", "o"}); });
  expect_refusal(io::ErrorKind::usage, {"--out"}, [] { parse_train({"--model", "m", "--data", "d"}); });
  expect_refusal(io::ErrorKind::usage, {"--model"}, [] { parse_eval({"--data", "d"}); });
  expect_refusal(io::ErrorKind::usage, {"--lr", "tierflow eval"}, [] {
    parse_eval({"--model", "m", "--data", "d", "--lr", "1"});
  });
  expect_refusal(io::ErrorKind::usage, {"--config"}, [] { parse_init({"--out", "d"}); });
}

TEST(Options, HelpIsGroupedAndFitsItsLines) {
  for (const std::size_t columns : {60, 80, 132})
    for (const char* command : {"init", "train", "plan", "eval", "export"}) {
      std::istringstream lines(help_of(command, columns));
      std::size_t longest = 0;
      for (std::string line; std::getline(lines, line);) {
        EXPECT_EQ(line.find_last_not_of(' ') + 1, line.size()) << line;
        if (line.find("  --") != 0) {  // an option's name is not broken
          EXPECT_LE(line.size(), columns) << line;
        }
        longest = std::max(longest, line.size());
      }
      if (std::string_view(command) == "train") {
        EXPECT_GT(longest, columns - 20);
      }
    }
  const std::string help = help_of("train", 80);
  std::size_t at = 0;
  for (const char* expected :
       {"Usage: tierflow train [OPTIONS]\n", "\nModel and data:\n  --model DIR ", "\nMachine, budgets",
        "\n  --host-memory SIZE ", "\nTraining:\n", "\n  --lr X                  highest learning rate",
        "\n  --max-skipped N ", "[20]", "\nResult and log:\n", "\n  --durability auto|", "\nEvaluation:\n",
        "\nOther:\n  --config-file FILE"}) {
    const std::size_t found = help.find(expected, at);
    ASSERT_NE(found, std::string::npos) << expected << " after:\n" << help.substr(0, at);
    at = found;
  }
  // Each option once.
  for (const char* option : {"--model", "--held-out", "--threads", "--json", "--no-export", "--micro-batches"})
    EXPECT_EQ(help.find(std::string("\n  ") + option + " "), help.rfind(std::string("\n  ") + option + " ")) << option;
}

// At a width at which no text is broken.
TEST(Options, HelpNamesItsCommandAndSaysWhatEachOptionIs) {
  for (const std::string command : {"init", "train", "plan", "eval", "export", "merge", "generate", "status", "verify",
                                    "data prepare", "data preview"}) {
    SCOPED_TRACE(command);
    std::string help = help_of(command, 100'000);
    EXPECT_TRUE(help.starts_with("Usage: tierflow " + command + " [OPTIONS]\n\n")) << help;
    const std::string below = "\n" + std::string(26, ' ');  // what stands there because a name is long
    for (std::size_t at = 0; (at = help.find(below, at)) != std::string::npos;) help.replace(at, below.size(), "  ");
    std::istringstream lines(help);
    int options = 0;
    for (std::string line; std::getline(lines, line);) {
      if (!line.starts_with("  --")) continue;
      ++options;
      const std::size_t name_ends = line.find("  ", 2);
      ASSERT_NE(name_ends, std::string::npos) << line;
      std::string text = line.substr(line.find_first_not_of(' ', name_ends));
      if (text.ends_with(']')) text.erase(text.rfind('['));  // the default
      text.erase(text.find_last_not_of(' ') + 1);
      ASSERT_FALSE(text.empty()) << line;
      EXPECT_EQ(std::string_view(",;:(").find(text.back()), std::string_view::npos) << "ends in its middle: " << line;
    }
    EXPECT_GE(options, 3);
  }
}

TEST(Options, OtherCommandsTakeTheirOwn) {
  const ExportOptions exported = parse_export({"--storage", "a,b", "--out", "o"});
  EXPECT_EQ(exported.storage.size(), 2u);
  EXPECT_EQ(exported.out, "o");
  const InitOptions made = parse_init({"--config", "c", "--out", "o", "--shard-size", "1GiB", "--seed", "3"});
  EXPECT_EQ(made.shard_size, std::uint64_t{1} << 30);
  EXPECT_EQ(made.seed, 3u);
  EXPECT_EQ(parse_init({"--config", "c", "--out", "o", "--as", "llama"}).read_as, "llama");
  const Words plan{"--model", "m", "--tokens-per-step"};
  EXPECT_EQ(parse_plan(plan + Words{"8192"}).tokens_per_step, 8192);
  expect_refusal(io::ErrorKind::usage, {"--tokens-per-step is -1"}, [&] { parse_plan(plan + Words{"-1"}); });
  for (const char* command : {"status", "verify"}) {
    EXPECT_EQ(parse_store_command(command, {"a,b", "--json"}).storage.size(), 2u);
    EXPECT_EQ(parse_store_command(command, {"--json", "a,b"}).storage.size(), 2u);
    EXPECT_TRUE(parse_store_command(command, {"--json", "--storage", "a"}).json);
    expect_refusal(io::ErrorKind::usage, {command, "needs the storage folders"},
                   [&] { parse_store_command(command, {}); });
  }
  const auto eval = [](const Words& more) { return parse_eval(Words{"--model", "m", "--data", "d"} + more); };
  EXPECT_EQ(eval({"--teacher-out", "t"}).teacher_top, 64);
  for (const std::int64_t top : {1, 8, 65536})
    EXPECT_EQ(eval({"--teacher-out", "t", "--teacher-top", std::to_string(top)}).teacher_top, top);
  for (const auto& [words, texts] :
       {std::pair{Words{"--teacher-out", "t", "--teacher-top", "0"}, "between 1 and 65536"},
        {Words{"--teacher-out", "t", "--teacher-top", "65537"}, "between 1 and 65536"},
        {Words{"--teacher-top", "8"}, "--teacher-top is for --teacher-out"},
        {Words{"--teacher-out", "t", "--max-sequences", "1"}, "leave --max-sequences and --per-document out"},
        {Words{"--teacher-out", "t", "--per-document", "p"}, "leave --max-sequences and --per-document out"},
        {Words{"--micro-batch", "4194305"}, "2^31 tokens"}})
    expect_refusal(io::ErrorKind::usage, {texts}, [&, words = words] { eval(words); });
  for (const char* command : {"prepare", "preview"})
    expect_refusal(io::ErrorKind::usage, {"`tierflow data", command, "needs --model"}, [&] {
      parse_data_command(command, {"--data", "d"});
    });
  EXPECT_EQ(parse_data_command("preview", {"5", "--model", "m", "--data", "d"}).examples, 5);
  EXPECT_EQ(parse_data_command("prepare", {"--out", "a.tfd", "--model", "m", "--data", "d"}).out, "a.tfd");
  expect_refusal(io::ErrorKind::usage, {"--out", "ends in .tfd"}, [] {
    parse_data_command("prepare", {"--out", "a.txt", "--model", "m", "--data", "d"});
  });
}

TEST(Options, WhatContradictsItselfIsRefused) {
  const Words store = {"--storage", "s"};
  for (const Words& words :
       {Words{"--held-out", "0"}, Words{"--eval-every", "2", "--export-best"},
        Words{"--eval-every", "2", "--early-stopping-patience", "3", "--early-stopping-threshold", "0.1"},
        store + Words{"--no-export"}, store + Words{"--resume"}, store + Words{"--fresh"},
        store + Words{"--durability", "step"}, Words{"--durability", "export-only"},
        Words{"--export-every", "2", "--export-keep", "1"}, Words{"--steps", "3"}, Words{"--epochs", "3"},
        Words{"--sample-every", "2", "--sample-prompts", "p", "--max-new-tokens", "8"}})
    EXPECT_NO_THROW(parse_train(needed + words)) << words[0];
  for (const auto& [words, text] :
       {std::pair{store + Words{"--resume", "--fresh"}, "--fresh leaves nothing to go on with"},
        {store + Words{"--go-back", "--fresh"}, "--fresh leaves nothing to go on with"},
        {Words{"--go-back"}, "--resume and --go-back need --storage"},
        {Words{"--resume"}, "--resume and --go-back need --storage"},
        {Words{"--no-export"}, "needs --storage"},
        {store + Words{"--no-export", "--export-every", "2"}, "--no-export or --export-every, not both"},
        {store + Words{"--no-export", "--eval-every", "2", "--export-best"}, "--no-export or --export-best, not both"},
        {Words{"--export-keep", "2"}, "--export-keep is for --export-every"},
        {Words{"--export-bandwidth", "1MiB"}, "--export-bandwidth is for models written while training goes on"},
        {Words{"--export-best"}, "--export-best needs --eval-every"},
        {Words{"--early-stopping-patience", "2"}, "--early-stopping-patience needs --eval-every"},
        {Words{"--held-out", "0", "--eval-every", "2", "--early-stopping-patience", "2"}, "raise --held-out"},
        {Words{"--held-out", "0", "--eval-every", "2", "--export-best"}, "raise --held-out"},
        {Words{"--early-stopping-threshold", "0.1"}, "--early-stopping-threshold is for --early-stopping-patience"},
        {Words{"--durability", "step"}, "--durability step needs --storage"},
        {Words{"--durability", "every=5"}, "--durability every=5 needs --storage"},
        {Words{"--durability", "sometimes"}, "it must be auto, step, every=N or export-only"},
        {Words{"--durability", "every=0"}, "takes 1 to 1000000 steps"},
        {Words{"--durability", "every=1000001"}, "takes 1 to 1000000 steps"},
        {Words{"--sample-every", "2"}, "--sample-every and --sample-prompts belong together"},
        {Words{"--sample-prompts", "p"}, "--sample-every and --sample-prompts belong together"},
        {Words{"--max-new-tokens", "8"}, "--max-new-tokens is for --sample-every"},
        {Words{"--clip", "-1"}, "--clip is -1;"},
        {Words{"--betas", "1,0.9"}, "at least 0 and below 1"}})
    refused(words, {text});
  bool automatic = false;
  EXPECT_EQ(commit_every("every=1000000", automatic), 1'000'000);
  EXPECT_FALSE(automatic);
  EXPECT_EQ(commit_every("auto", automatic), 1);
  EXPECT_TRUE(automatic);
  EXPECT_EQ(commit_every("step", automatic), 1);
  EXPECT_EQ(commit_every("export-only", automatic), 0);
  EXPECT_FALSE(automatic);
}

TEST(Options, ProseIsBrokenBetweenWords) {
  EXPECT_EQ(wrapped("one two three", 80), "one two three");
  EXPECT_EQ(wrapped("one two three", 7), "one two\nthree");
  EXPECT_EQ(wrapped("one two three", 6), "one\ntwo\nthree");
  EXPECT_EQ(wrapped("one two three", 9, 2), "one two\n  three");
  EXPECT_EQ(wrapped("a extraordinarily b", 5), "a\nextraordinarily\nb");
  EXPECT_EQ(wrapped("", 5), "");
  EXPECT_EQ(columns_of(-1), 80u);
}

TEST(Options, TrainingIsDescribedInAParagraph) {
  TrainOptions o = parse_train(needed + Words{"--steps", "7", "--micro-batches", "3", "--clip", "none", "--lr", "0.5"});
  EXPECT_EQ(
      describe(o),
      "training m on a, b: 7 steps of 3 x 1 sequences of 512 tokens; AdamW with learning rate 0.5 (cosine), weight "
      "decay 0, clip none; fp32-master+adam8, seed 0; result in o. --log-json keeps all options and every step");
  o = parse_train(
      {"--config", "c", "--data", "d", "--no-export", "--storage", "s", "--warmup", "2", "--log-json", "l"});
  EXPECT_EQ(
      describe(o),
      "training c from random weights on d: 1 epochs of 1 x 1 sequences of 512 tokens; AdamW with learning rate "
      "1e-05 (cosine, warm-up 2 steps), weight decay 0, clip 1; fp32-master+adam8, seed 0; the result stays in the "
      "store. All options: first line of l");
}

TEST(Options, SizesForPeopleAreNeverRoundedToNothing) {
  EXPECT_EQ(human_bytes(0), "0 bytes");
  EXPECT_EQ(human_bytes(1), "1 byte");
  EXPECT_EQ(human_bytes(1023), "1023 bytes");
  EXPECT_EQ(human_bytes(1024), "1 KiB");
  EXPECT_EQ(human_bytes(300 << 10), "300 KiB");
  EXPECT_EQ(human_bytes((1 << 20) + (1 << 19)), "1.5 MiB");
  EXPECT_EQ(human_bytes(10 << 20), "10 MiB");
  EXPECT_EQ(human_bytes(1000 << 20), "1000 MiB");
  EXPECT_EQ(human_bytes(std::uint64_t{5} << 30), "5.00 GiB");
  EXPECT_EQ(human_bytes(std::uint64_t{10} << 30), "10.0 GiB");
  EXPECT_EQ(human_count(0), "0");
  EXPECT_EQ(human_count(8192), "8192");
  EXPECT_EQ(human_count(657e3), "0.66M");
  EXPECT_EQ(human_count(152e6), "152.0M");
  EXPECT_EQ(human_count(7.6e9), "7.60B");
}

class ConfigFile : public ::testing::Test {
 protected:
  TrainOptions parse(const std::string& name, const std::string& text, const Words& more = {}) {
    write_file(dir_.path() / name, text);
    return parse_train(Words{"--config-file", (dir_.path() / name).string()} + more);
  }
  void refused(const std::string& name, const std::string& text, std::initializer_list<std::string_view> words) {
    SCOPED_TRACE(text);
    expect_refusal(io::ErrorKind::input, words, [&] { parse(name, text, needed); });
  }
  testing::TempDir dir_;
};

TEST_F(ConfigFile, TomlAndJsonSayTheSame) {
  const auto toml = parse("a.toml",
                          "model = \"m\"\ndata = [\"a\", \"b\"]\nout = \"o\"\nlr = 1e-4\nbetas = [0.9, 0.95]\nclip = "
                          "\"none\"\njson = true\n"
                          "device_memory = \"2GiB\"\nseed = 7\n");
  const auto json =
      parse("a.json", R"({"model":"m","data":["a","b"],"out":"o","lr":1e-4,"betas":[0.9,0.95],"clip":"none","json":true,
    "device-memory":"2GiB","seed":7,"python":null})");
  EXPECT_EQ(effective_configuration(toml), effective_configuration(json));
  EXPECT_EQ(toml.device_memory, std::uint64_t{2} << 30);
  EXPECT_EQ(toml.lr, 1e-4);
}

TEST_F(ConfigFile, TheCommandLineWins) {
  EXPECT_EQ(parse("a.toml", "lr = 1\nsteps = 3", needed + Words{"--lr", "2"}).lr, 2);
  EXPECT_EQ(parse("a.toml", "lr = 1\nsteps = 3", needed).steps, 3);
}

TEST_F(ConfigFile, WhatWasMeantForOneRunIsNotRepeated) {
  const TrainOptions o = parse("once.json", R"({"fresh": true, "steps": 3, "storage": "x"})", needed);
  EXPECT_TRUE(o.fresh);
  const std::string text = effective_configuration(o);
  EXPECT_EQ(text.find("fresh"), std::string::npos);
  EXPECT_NE(text.find("\"steps\": 3"), std::string::npos);
}

TEST_F(ConfigFile, TheEffectiveConfigurationReadsBack) {
  const TrainOptions o = parse_train(
      needed + Words{"--lr", "0.1", "--clip", "0.3", "--storage", "x,y", "--device-memory", "1000001", "--json"});
  const std::string text = effective_configuration(o);
  EXPECT_EQ(effective_configuration(parse("back.json", text)), text);
}

TEST_F(ConfigFile, BadFilesGetOneLine) {
  refused("a.toml", "sequence_lenght = 5", {"a.toml", "sequence_lenght", "--sequence-length"});
  refused("a.toml", "lr = = 5", {"a.toml", "line 1"});
  refused("a.toml", "lr = \"fast\"", {"a.toml", "--lr", "fast"});
  refused("a.toml", "lr = nan", {"a.toml", "--lr"});
  refused("a.toml", "lr = 1979-05-27", {"a.toml", "lr"});
  refused("a.toml", "[lr]\nx = 1", {"a.toml", "lr"});
  refused("a.toml", "lr = [[1]]", {"a.toml", "lr"});
  refused("a.toml", "lr = [1, 2]", {"a.toml", "--lr", "1 value"});
  refused("a.toml", "data = []", {"a.toml", "--data"});
  refused("a.toml", "json = \"yes\"", {"a.toml", "--json"});
  refused("a.toml", "config-file = \"b\"", {"a.toml", "config-file"});
  refused("a.toml", "lr = 1\nlr = 2", {"a.toml", "line 2"});
  refused("a.toml", "device-memory = 1\ndevice_memory = 2", {"a.toml", "twice"});
  refused("a.toml", "a = " + std::string(10000, '['), {"a.toml"});
  refused("a.toml", std::string(2 << 20, '#'), {"a.toml", "bytes"});
  refused("a.json", "[1]", {"a.json", "object"});
  refused("a.json", "{\"lr\":1,\"lr\":2}", {"a.json", "twice"});
  expect_refusal(io::ErrorKind::input, {"gone.toml"}, [] { parse_train({"--config-file", "/gone.toml"}); });
}

}  // namespace
}  // namespace tierflow

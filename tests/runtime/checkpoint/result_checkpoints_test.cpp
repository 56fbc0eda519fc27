// The models that a run writes on its way, and the folder of its result around them.
#include <gtest/gtest.h>

#include <algorithm>

#include "runtime/base/exception.h"
#include "runtime/checkpoint/result_folder.h"
#include "support/temp_dir.h"
#include "tests/runtime/expect.h"
#include "tests/support/system_calls.h"

namespace tierflow {
namespace {

namespace fs = std::filesystem;
using testing::expect_refusal;
using testing::write_file;

TEST(ResultFolder, CheckpointsStayWhereTheyAreExpectedAlone) {
  const testing::TempDir dir;
  const fs::path out = dir.path() / "out";
  write_file(out / "checkpoint-12" / "config.json", "{}");
  fs::create_directory(out / "checkpoint-3.partial");
  expect_refusal(io::ErrorKind::usage, {"not an empty folder"}, [&] { const ResultFolder refused(out); });
  { const ResultFolder taken(out, true); }
  EXPECT_TRUE(fs::exists(out / "checkpoint-12" / "config.json"));
  for (const char* name : {"checkpoint-", "checkpoint-x", "checkpoint-1x", "checkpoint--1", "my-checkpoint-1"}) {
    fs::create_directory(out / name);
    expect_refusal(io::ErrorKind::usage, {"not an empty folder"}, [&] { const ResultFolder refused(out, true); });
    EXPECT_TRUE(fs::remove(out / name)) << name;
  }
  write_file(out / "checkpoint-1", "a file");
  expect_refusal(io::ErrorKind::usage, {"not an empty folder"}, [&] { const ResultFolder refused(out, true); });
  fs::remove(out / "checkpoint-1");
  fs::create_directory_symlink("checkpoint-12", out / "checkpoint-1");
  expect_refusal(io::ErrorKind::usage, {"not an empty folder"}, [&] { const ResultFolder refused(out, true); });
}

class CheckpointFolders : public ::testing::Test {
 protected:
  static std::function<void(const ResultFolder&)> model(const std::string& weights) {
    return [=](const ResultFolder& folder) {
      folder.begin();
      write_text(folder.path() / "model.safetensors", weights);
      write_text(folder.path() / "config.json", "{}");
    };
  }
  std::string weights(std::int64_t step) const {
    return read_text(out_ / ("checkpoint-" + std::to_string(step)) / "model.safetensors", 100);
  }
  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (const auto& entry : fs::directory_iterator(out_)) all.push_back(entry.path().filename());
    std::sort(all.begin(), all.end());
    return all;
  }

  const testing::TempDir dir_;
  const fs::path out_ = dir_.path() / "out";
  const Checkpoints checkpoints_{out_};
};

TEST_F(CheckpointFolders, HaveTheirNameWhenTheyAreWhole) {
  EXPECT_EQ(checkpoints_.write(7, model("seven")), out_ / "checkpoint-7");
  EXPECT_EQ(names(), (std::vector<std::string>{"checkpoint-7"}));
  EXPECT_EQ(weights(7), "seven");
  EXPECT_TRUE(checkpoints_.has(7));
  EXPECT_FALSE(checkpoints_.has(8) || checkpoints_.has(0) || checkpoints_.has(-7));
  checkpoints_.write(7, model("again"));
  EXPECT_EQ(weights(7), "again");
  EXPECT_THROW(checkpoints_.write(9,
                                  [&](const ResultFolder& folder) {
                                    model("nine")(folder);
                                    EXPECT_EQ(folder.path(), out_ / "checkpoint-9.partial");
                                    throw Exception(io::ErrorKind::cancelled, "stopped");
                                  }),
               Exception);
  EXPECT_EQ(names(), (std::vector<std::string>{"checkpoint-7"}));
  checkpoints_.remove(8);
  checkpoints_.remove(7);
  EXPECT_TRUE(fs::is_empty(out_));
}

// It was killed as it wrote the folder, or just before the folder had its name.
TEST_F(CheckpointFolders, TakeThePlaceOfWhatAKilledRunLeft) {
  for (const char* left : {"model.safetensors", "config.json.partial", "config.json"}) {
    write_file(out_ / "checkpoint-5.partial" / left, "half");
    write_file(out_ / "checkpoint-5.partial" / "config.json.partial", "");
    checkpoints_.write(5, model(left));
    EXPECT_EQ(weights(5), left);
    EXPECT_EQ(names(), (std::vector<std::string>{"checkpoint-5"}));
  }
}

TEST_F(CheckpointFolders, FilesOfSomebodyElseStay) {
  checkpoints_.write(5, model("five"));
  write_file(out_ / "checkpoint-5" / "notes.txt", "mine");
  expect_refusal(io::ErrorKind::io, {"rename", "checkpoint-5", "it holds files of somebody else; remove it"},
                 [&] { checkpoints_.write(5, model("again")); });
  checkpoints_.remove(5);
  EXPECT_EQ(read_text(out_ / "checkpoint-5" / "notes.txt", 100), "mine");
}

TEST_F(CheckpointFolders, TheLastOnesAreKept) {
  for (const std::int64_t step : {3, 11, 2, 100, 20, 1, 4, 30, 9, 10}) checkpoints_.write(step, model("w"));
  write_file(out_ / "checkpoint-200" / "model.safetensors", "no config");
  EXPECT_EQ(checkpoints_.newest("config.json"), out_ / "checkpoint-100");
  EXPECT_EQ(checkpoints_.newest("adapter_config.json"), std::nullopt);
  checkpoints_.remove(200);
  checkpoints_.keep_last(3, 2);
  EXPECT_EQ(names(), (std::vector<std::string>{"checkpoint-100", "checkpoint-2", "checkpoint-20", "checkpoint-30"}));
  checkpoints_.keep_last(3, 30);
  EXPECT_EQ(names().size(), 4u);
  checkpoints_.keep_last(1, 0);
  EXPECT_EQ(names(), (std::vector<std::string>{"checkpoint-100"}));
}

// Older ones go when it has its name: after a power cut there would be none.
TEST_F(CheckpointFolders, TheirNamesSurviveAPowerCut) {
  fs::create_directory(out_);
  const testing::SystemCalls calls;
  checkpoints_.write(7, model("seven"));
  ASSERT_FALSE(calls.seen().empty());
  EXPECT_EQ(calls.seen().back().name, "fsync");
  EXPECT_EQ(calls.seen().back().path, out_.string());
}

// What a kill leaves of one that is being removed is no model with a file less.
TEST_F(CheckpointFolders, LoseTheFileThatMakesThemWholeFirst) {
  for (const char* last : {"config.json", "adapter_config.json"}) {
    for (const char* name : {last, "model.safetensors", "tokenizer.json", "vocab.json", "merges.txt", "tekken.json",
                             "added_tokens.json", "generation_config.json", "special_tokens_map.json"})
      write_file(out_ / "checkpoint-7" / name, "{}");
    std::vector<std::string> gone;
    const testing::SystemCalls calls([&](const testing::SystemCall& call) -> std::optional<long> {
      if (call.name == "unlink" && fs::exists(call.path)) gone.push_back(fs::path(call.path).filename());
      return {};
    });
    checkpoints_.remove(7);
    ASSERT_EQ(gone.size(), 9U);
    EXPECT_EQ(gone.front(), last);
    EXPECT_TRUE(fs::is_empty(out_));
  }
}

// A folder that cannot be read is not one without checkpoints.
TEST_F(CheckpointFolders, AFolderThatIsGoneIsNamed) {
  const Checkpoints gone(dir_.path() / "gone");
  expect_refusal(io::ErrorKind::input, {"read folder", "gone"}, [&] { gone.newest("config.json"); });
  expect_refusal(io::ErrorKind::input, {"read folder", "gone"}, [&] { gone.keep_last(0, 0); });
}

}  // namespace
}  // namespace tierflow

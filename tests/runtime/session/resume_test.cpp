// A session that goes on with what another left has the bits of one that was never interrupted, under other budgets
// too, and refuses what is another run.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <regex>
#include <thread>

#include "runtime/base/exception.h"
#include "runtime/planning/moved_store.h"
#include "runtime/session/layers.h"
#include "tests/runtime/expect.h"
#include "tests/runtime/session/fixture.h"

namespace tierflow::testing {
namespace {

constexpr int kSteps = 6;

struct Steps {
  std::vector<double> losses, norms;
  std::vector<std::vector<float>> masters;
};

// frozen: every other tensor is not trained.
Model model_of(const Case& which, bool frozen = false) {
  ModelSpec spec = parse_model_spec(which.json, which.name);
  int tensors = 0;
  for (UnitSpec& unit : spec.units)
    for (TensorSpec& tensor : unit.tensors) tensor.trainable = !frozen || ++tensors % 2 == 0;
  return {make_model(std::move(spec)), initial(11)};
}
double rate(std::int64_t step) {
  return 1e-3 * static_cast<double>(1 + step);
}
void train(Session& session, const SessionOptions& options, std::int64_t up_to, Steps& seen) {
  while (session.steps() < up_to) {
    const auto step = session.steps();
    const StepResult result = session.step(batches(options.micro_batches, static_cast<int>(step)), rate(step));
    EXPECT_EQ(result.step, step + 1);
    seen.losses.resize(step);
    seen.norms.resize(step);
    seen.losses.push_back(result.loss);
    seen.norms.push_back(result.grad_norm);
    session.remember("after " + std::to_string(session.steps()));
  }
}
Steps uninterrupted(const Case& which, const SessionOptions& options, bool frozen = false) {
  Session session(model_of(which, frozen), options, {.weight_decay = 0.1});
  Steps all;
  train(session, options, kSteps, all);
  all.masters = masters_of(session);
  return all;
}

class Resume : public ::testing::TestWithParam<Case> {
 protected:
  SessionOptions small(bool clipped, double share) const {
    SessionOptions options = resident(2);
    if (!clipped) {
      options.clip.reset();
      options.deferred_share = share;
    }
    options = streamed(options, folder_);
    options.commit_every = 1;
    options.run = R"({"data":"a"})";
    return options;
  }
  const Folder folder_;
};

TEST_P(Resume, HasTheBitsOfARunThatWasNeverInterrupted) {
  for (const auto& [clipped, share] : {std::pair{true, 0.0}, std::pair{false, 0.0}, std::pair{false, 0.5}}) {
    SCOPED_TRACE(std::to_string(clipped) + " " + std::to_string(share));
    SessionOptions options = resident(2);
    if (!clipped) options.clip.reset();
    const Steps expected = uninterrupted(GetParam(), options);
    Steps seen;
    options = small(clipped, share);
    // Each session is destroyed in the middle of what it does; the next has other budgets, engine and chaos.
    std::int64_t least = 0;
    for (int round = 0; round < 3; ++round) {
      SessionOptions with = options;
      with.resume = round > 0;
      with.engine = round == 1 ? io::EngineKind::threads : io::EngineKind::automatic;
      with.chaos_seed = round;
      if (round > 0) with.chunk_elements = 0;
      if (round == 1) with.host_memory = 300 * 1024;
      if (round == 2) with.host_memory = with.device_memory = 64 * kMiB;
      Session session(model_of(GetParam()), with, {.weight_decay = 0.1});
      const std::int64_t begun = session.steps();
      if (round > 0) {
        // The commit of a step runs beside the next one, and ends before that one's own: of three steps before, one at
        // least is there.
        EXPECT_GE(begun, least);
        EXPECT_EQ(session.remembered(), begun == 0 ? "" : "after " + std::to_string(begun));
      }
      train(session, with, round == 2 ? kSteps : begun + 3, seen);
      least = begun + 1;
      if (round == 2) {
        seen.masters = masters_of(session);
        session.discard();
      }
    }
    EXPECT_EQ(seen.losses, expected.losses);
    EXPECT_EQ(seen.norms, expected.norms);
    EXPECT_TRUE(seen.masters == expected.masters);
    EXPECT_FALSE(std::filesystem::exists(folder_.path / "state.tfv"));
  }
}
INSTANTIATE_TEST_SUITE_P(Models, Resume, ::testing::ValuesIn(cases_with_balance("0.1")), case_name);

class Resumed : public Resume {};

TEST_P(Resumed, AfterACommitNothingIsDoneAgain) {
  const SessionOptions options = small(true, 0);
  Steps seen;
  {
    Session session(model_of(GetParam()), options);
    train(session, options, 3, seen);
    session.commit();
  }
  SessionOptions again = options;
  again.resume = true;
  {
    Session session(model_of(GetParam()), again);
    EXPECT_EQ(session.steps(), 3);
  }
  // Every other step, and the last by hand.
  again.commit_every = 2;
  {
    Session session(model_of(GetParam()), again);
    train(session, again, 6, seen);
  }
  const Session session(model_of(GetParam()), again);
  EXPECT_EQ(session.steps() % 2, 0);
  EXPECT_GE(session.steps(), 4);
}

std::string content(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// What an export of the model after `steps` steps writes.
std::string exported_after(int steps, const Case& which, const SessionOptions& options) {
  const Folder folder;
  Session session(model_of(which), options, {.weight_decay = 0.1});
  Steps seen;
  train(session, options, steps, seen);
  session.export_hf(folder.path / "out");
  return content(folder.path / "out/model.safetensors");
}

// All of it lies in memory. A commit is planned before it is known whether its step is skipped.
TEST_P(Resumed, ACommitWritesOfWhatIsResidentWhatChangedAlone) {
  SessionOptions options = small(true, 0);
  options.host_memory = options.device_memory = 64 * kMiB;
  const auto written_by_two_commits = [&](bool skips) {
    Model model = model_of(GetParam());
    if (skips)
      model.weights = [](const TensorSpec& tensor, std::uint64_t first, std::span<float> out) {
        initial(11)(tensor, first, out);
        if (tensor.role.find("down_proj") != std::string::npos && first == 0) out[0] = INFINITY;
      };
    Session session(std::move(model), options);
    std::uint64_t before = 0;
    for (int step = 0; step < 4; ++step) {  // each commits the one before
      if (step == 3) before = session.bytes_written();
      EXPECT_EQ(session.step(batches(options.micro_batches, step), 1e-3).skipped, skips);
    }
    session.commit();
    const std::uint64_t written = session.bytes_written() - before;
    session.discard();
    return written;
  };
  const auto parameters = static_cast<std::uint64_t>(model_of(GetParam()).spec().parameters());
  EXPECT_GT(written_by_two_commits(/*skips=*/false), 2 * 6 * parameters);
  // Manifests and superblocks, of commits before that were still being written too.
  EXPECT_LT(written_by_two_commits(/*skips=*/true), 2 * parameters);
}

TEST_P(Resumed, AStepThatIsKeptIsWrittenWhileOthersFollow) {
  for (const auto& [clipped, share] : {std::pair{true, 0.0}, std::pair{false, 0.0}, std::pair{false, 0.5}}) {
    SCOPED_TRACE(std::to_string(clipped) + " " + std::to_string(share));
    SessionOptions plain = resident(2);
    if (!clipped) plain.clip.reset();
    const Steps expected = uninterrupted(GetParam(), plain);
    const std::string after_two = exported_after(2, GetParam(), plain),
                      after_five = exported_after(5, GetParam(), plain);
    const SessionOptions options = small(clipped, share);
    Steps seen;
    {
      Session session(model_of(GetParam()), options, {.weight_decay = 0.1});
      ASSERT_NE(session.plan().exporting, 0U);
      const std::vector<bool>& resident = session.plan().arrangement.hi_resident;
      ASSERT_TRUE(std::ranges::count(resident, false) > 0);  // such words are overwritten by steps
      train(session, options, 2, seen);
      auto kept = session.keep_step();
      ASSERT_NE(kept, nullptr);
      EXPECT_FALSE(kept->durable());
      EXPECT_THROW(kept->wait(), Exception);
      EXPECT_THROW(kept->export_hf(folder_.path / "early", {}), Exception);
      EXPECT_THROW(session.keep_step(), Exception);
      train(session, options, 3, seen);
      kept->wait();
      EXPECT_TRUE(kept->durable());
      std::thread writes([&] { kept->export_hf(folder_.path / "beside", {}); });
      train(session, options, 5, seen);
      writes.join();
      EXPECT_TRUE(content(folder_.path / "beside/model.safetensors") == after_two);
      EXPECT_THROW(session.commit(), Exception);
      kept->export_hf(folder_.path / "later", {});
      EXPECT_TRUE(content(folder_.path / "later/model.safetensors") == after_two);
    }
    SessionOptions again = options;
    again.resume = true;
    Session session(model_of(GetParam()), again, {.weight_decay = 0.1});
    EXPECT_EQ(session.steps(), 2);  // no commit came after the one that was kept
    train(session, again, 5, seen);
    auto kept = session.keep_step();
    train(session, again, kSteps, seen);
    kept->wait();
    kept->export_hf(folder_.path / "five", {});
    EXPECT_TRUE(content(folder_.path / "five/model.safetensors") == after_five);
    kept.reset();
    session.commit();
    seen.masters = masters_of(session);
    session.discard();
    EXPECT_EQ(seen.losses, expected.losses);
    EXPECT_TRUE(seen.masters == expected.masters);
  }
}

TEST_P(Resumed, AStepThatIsKeptHoldsCommitsBackAndNoLonger) {
  SessionOptions options = small(true, 0);
  options.commit_every = 2;
  const std::string after_one = exported_after(1, GetParam(), resident(2)),
                    after_three = exported_after(3, GetParam(), resident(2));
  Steps seen;
  {
    Session session(model_of(GetParam()), options, {.weight_decay = 0.1});
    train(session, options, 1, seen);
    auto kept = session.keep_step();  // committed for that
    ASSERT_NE(kept, nullptr);
    train(session, options, 3, seen);
    kept->wait();
    kept->export_hf(folder_.path / "one", {});
    EXPECT_TRUE(content(folder_.path / "one/model.safetensors") == after_one);
    kept.reset();
    train(session, options, 4, seen);  // the third is committed as soon as it can be
  }
  options.resume = true;
  Session session(model_of(GetParam()), options, {.weight_decay = 0.1});
  EXPECT_EQ(session.steps(), 3);
  const auto kept = session.keep_step();
  EXPECT_TRUE(kept->durable());  // it is what the session began with
  kept->export_hf(folder_.path / "three", {});
  EXPECT_TRUE(content(folder_.path / "three/model.safetensors") == after_three);
}

TEST_P(Resumed, WhatIsFrozenStaysInItsPlace) {
  SessionOptions alone = resident(2);
  alone.clip.reset();
  const Steps expected = uninterrupted(GetParam(), alone, true);
  SessionOptions options = small(false, 0);
  Steps seen;
  for (int round = 0; round < 3; ++round) {
    Session session(model_of(GetParam(), true), options, {.weight_decay = 0.1});
    train(session, options, round == 2 ? kSteps : session.steps() + 2, seen);
    seen.masters = masters_of(session);
    options.resume = true;
  }
  EXPECT_EQ(seen.losses, expected.losses);
  EXPECT_TRUE(seen.masters == expected.masters);
}

TEST_P(Resumed, AnotherRunIsRefusedAndStays) {
  const SessionOptions options = small(true, 0);
  {
    Session session(model_of(GetParam()), options);
    Steps seen;
    train(session, options, 2, seen);
    session.commit();
  }
  const auto refused = [&](SessionOptions with, const Case& which, const char* names) {
    with.resume = true;
    try {
      const Session session(model_of(which), with);
      ADD_FAILURE() << "went on: " << names;
    } catch (const Exception& error) {
      EXPECT_EQ(error.error().kind, io::ErrorKind::usage);
      EXPECT_NE(std::string(error.what()).find(names), std::string::npos) << error.what();
    }
  };
  SessionOptions other = options;
  other.run = R"({"data":"b"})";
  refused(other, GetParam(), "its run is not");
  other = options;
  other.precision = Precision::bf16_sr_adam8;
  refused(other, GetParam(), "its precision is not");
  for (const Case& which : cases("0.1"))
    if (which.name != GetParam().name) {
      refused(options, which, "its model is not");
      break;
    }
  other = options;
  other.resume = true;
  EXPECT_EQ(Session(model_of(GetParam()), other).steps(), 2);
}

TEST_P(Resumed, IsNeverTakenForSomethingElse) {
  SessionOptions options = small(true, 0);
  {
    const Session session(model_of(GetParam()), options);
    EXPECT_EQ(session.commit_every(), 1);
    EXPECT_NE(session.describe().find("every step is committed"), std::string::npos);
  }
  options.commit_every = 0;
  EXPECT_THROW(Session(model_of(GetParam()), options), Exception);
}
INSTANTIATE_TEST_SUITE_P(Models, Resumed, ::testing::Values(cases("0.1").front()), case_name);

struct CutCase {
  Precision precision = Precision::fp32_master_adam8;
  bool frozen = false;  // one of the tables, and a part of each block
};

struct Cut : ::testing::TestWithParam<CutCase> {
  // Its tables are ten of the smallest chunks each.
  Model wide() const {
    ModelSpec spec = parse_model_spec(std::regex_replace(llama_json("LlamaForCausalLM", ""),
                                                         std::regex(R"("vocab_size": 96)"), R"("vocab_size": 20480)"),
                                      "wide");
    if (GetParam().frozen) set_trainable(spec, {.freeze = {"embed_tokens", "mlp"}});
    return {make_model(std::move(spec)), initial(11)};
  }
  SessionOptions with(std::uint64_t host) const {
    SessionOptions options = streamed(resident(1), folder);
    options.precision = GetParam().precision;
    options.device_memory = 64 * kMiB;
    options.host_memory = host;
    options.commit_every = 1;
    return options;
  }
  // Goes on with what is there for `steps` more: what was said.
  std::vector<std::string> go_on(SessionOptions options, int steps, Steps& seen) {
    std::vector<std::string> said;
    options.resume = can_resume(options);
    Session session(wide(), options, {.weight_decay = 0.1}, {}, [&](const std::string& line) { said.push_back(line); });
    EXPECT_LE(session.memory().host_used, options.host_memory);
    largest = session.plan().layout->max_word_bytes() / 2;
    train(session, options, session.steps() + steps, seen);
    session.commit();
    seen.masters = masters_of(session);
    return said;
  }
  const Folder folder;
  std::uint64_t largest = 0;  // of the chunks
};

TEST_P(Cut, IsThatOfTheBudgetsAndChangesNoBit) {
  SessionOptions plain = resident(1);
  plain.precision = GetParam().precision;
  Steps expected, seen;
  {
    Session session(wide(), plain, {.weight_decay = 0.1});
    train(session, plain, kSteps, expected);
    expected.masters = masters_of(session);
  }
  EXPECT_TRUE(go_on(with(256 * kMiB), 2, seen).empty());
  const std::uint64_t whole = largest;
  // Too small for such chunks.
  const std::vector<std::string> said = go_on(with(kMiB), 1, seen);
  ASSERT_EQ(said.size(), 1U);
  EXPECT_NE(said[0].find("has chunks for other budgets (1310720 elements, here 65536)"), std::string::npos) << said[0];
  EXPECT_LT(largest, whole);
  EXPECT_TRUE(go_on(with(2 * kMiB), 1, seen).empty());
  // Far larger than such chunks need, and then so small that little could be done ahead.
  EXPECT_EQ(go_on(with(256 * kMiB), 1, seen).size(), 1U);
  EXPECT_EQ(largest, whole);
  EXPECT_EQ(go_on(with(12 * kMiB), 1, seen).size(), 1U);
  EXPECT_EQ(seen.losses, expected.losses);
  EXPECT_EQ(seen.norms, expected.norms);
  EXPECT_TRUE(seen.masters == expected.masters);
}
INSTANTIATE_TEST_SUITE_P(Precisions, Cut,
                         ::testing::Values(CutCase{.frozen = true}, CutCase{Precision::fp32_master_adam32}));

using CutOfALimitedRun = Cut;

TEST_P(CutOfALimitedRun, CountsAsWritten) {
  Steps seen;
  go_on(with(256 * kMiB), 1, seen);
  SessionOptions options = with(kMiB);
  options.resume = true;
  options.write_limit = 28 * kMiB;  // a step writes less, a step and the state more
  std::vector<std::string> said;
  const auto open = [&] {
    return Session(wide(), options, {}, {}, [&](const std::string& line) { said.push_back(line); });
  };
  expect_refusal(io::ErrorKind::usage, {"--max-tb-written allows no step"}, open);
  EXPECT_TRUE(said.empty());
  options.write_limit = 0;
  EXPECT_GT(open().bytes_written(), 11 * kMiB);
  EXPECT_EQ(said.size(), 1U);
  options.write_limit = 28 * kMiB;
  EXPECT_NO_THROW(open());
}
INSTANTIATE_TEST_SUITE_P(One, CutOfALimitedRun, ::testing::Values(CutCase{}));

struct CutOfADamagedState : Cut {
  // The end of the files is the second slot, of generations with even numbers.
  void damage_newest() const {
    ASSERT_EQ(find_left_store({folder.path}).generation % 2, 0U);
    const std::filesystem::path path = folder.path / "state.tfv";
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    const auto size = static_cast<std::int64_t>(std::filesystem::file_size(path));
    for (std::int64_t at = size - static_cast<std::int64_t>(2 * kMiB); at < size; at += 4096) {
      file.seekg(at);
      const char flipped = static_cast<char>(file.get() ^ 1);
      file.seekp(at);
      file.put(flipped);
    }
  }
};

TEST_P(CutOfADamagedState, StaysWhereTheBudgetsAllowThat) {
  Steps seen;
  go_on(with(256 * kMiB), 3, seen);
  const SessionOptions tight = with(kMiB), roomy = with(12 * kMiB);
  damage_newest();
  expect_refusal(io::ErrorKind::corruption, {"is not what was written"}, [&] { go_on(tight, 1, seen); });
  const std::vector<std::string> said = go_on(roomy, 1, seen);
  ASSERT_EQ(said.size(), 2U);
  EXPECT_NE(said[1].find("the chunks of the state stay as they are"), std::string::npos) << said[1];
  EXPECT_EQ(seen.losses.size(), 3U);  // from the generation before
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path), {}), 2);
}
INSTANTIATE_TEST_SUITE_P(One, CutOfADamagedState, ::testing::Values(CutCase{}));

// As a loop of one's own does it: whether there is something to go on with, and that it is of these layers.
TEST(ResumedLayers, GoOnAndAreNotTakenForOthers) {
  struct Plain : Layer {
    explicit Plain(std::int64_t width) { weight = register_parameter("weight", torch::ones({width, 8})); }
    Carry forward(const Carry&, const Shared& shared) override { return {(weight * shared.ids.sum()).sum()}; }
    torch::Tensor weight;
  };
  const auto model = [](std::int64_t width) {
    return Layers().repeat(2, "layer", [width] { return std::make_shared<Plain>(width); }).build();
  };
  const Folder folder;
  SessionOptions options = streamed(resident(1), folder);
  options.commit_every = 1;
  EXPECT_FALSE(can_resume(options));
  Session(model(4), options).commit();
  options.resume = can_resume(options);
  EXPECT_TRUE(options.resume);
  SessionOptions another = options;
  another.run = "another";
  another.storage.push_back(folder.path / "more");
  expect_refusal(io::ErrorKind::usage, {"another run's"}, [&] { can_resume(another); });
  EXPECT_FALSE(std::filesystem::exists(folder.path / "more"));  // nor is it moved there
  expect_refusal(io::ErrorKind::usage, {"its model is not"}, [&] { Session(model(5), options); });
  Session(model(4), options).discard();
  options.resume = can_resume(options);
  EXPECT_FALSE(options.resume);
}

}  // namespace
}  // namespace tierflow::testing

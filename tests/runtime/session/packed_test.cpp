// Micro-batches of packed rows through a session: the same bits under every budget, and a door for wrong positions.
#include <gtest/gtest.h>

#include "runtime/device/device_memory.h"
#include "tests/runtime/expect.h"
#include "tests/runtime/session/fixture.h"

namespace tierflow::testing {
namespace {

std::vector<MicroBatch> packed_batches(int step) {
  std::vector<MicroBatch> all = batches(2, step);
  all[0].positions = packed({{5, 1, 10}, {16}}).positions;
  all[1].positions = packed({{8, 8}, {3, 12, 1}}).positions;
  return all;
}

struct Outcome {
  std::vector<double> losses;
  std::vector<std::vector<float>> masters;
  bool operator==(const Outcome&) const = default;
};

Outcome run(const Case& which, const SessionOptions& options) {
  Session session(plain_model(which), options, {.lr = 3e-3});
  Outcome outcome;
  for (int step = 0; step < 3; ++step) outcome.losses.push_back(session.step(packed_batches(step)).loss);
  outcome.losses.push_back(session.evaluate(packed_batches(9)).loss);
  outcome.masters = masters_of(session);
  return outcome;
}

TEST(PackedRows, have_the_same_bits_under_every_budget) {
  DeviceMemory::install();
  const Folder folder;
  for (const char* name : {"mistral", "gpt2", "opt"}) {  // rotary with grouped heads and a window; learned positions
    SCOPED_TRACE(name);
    const Case which = case_called(name);
    const SessionOptions options = resident(2);
    const Outcome expected = run(which, options);
    EXPECT_EQ(run(which, least_device(options, which, {})), expected);
    SessionOptions small = streamed(options, folder);
    EXPECT_EQ(run(which, small), expected);
    if (can_keep(which, {})) {
      EXPECT_EQ(run(which, swapping(small, which, {})), expected);
    }
    Session plain(plain_model(which), options);
    EXPECT_NE(plain.step(batches(2, 0)).loss, expected.losses[0]);  // the documents do not see each other
  }
}

// A model that does not look at positions: what is wrong with them shows at the session's door.
class WithoutPositions final : public ForwardingModel {
 public:
  using ForwardingModel::ForwardingModel;
  Shared share(const MicroBatch& batch, torch::Device device) const override {
    return ForwardingModel::share({.ids = batch.ids, .labels = batch.labels}, device);
  }
};

TEST(PackedRows, with_wrong_positions_are_refused) {
  DeviceMemory::install();
  const auto session = [] {
    const Case which = cases()[0];
    return Session(
        {std::make_shared<WithoutPositions>(make_model(parse_model_spec(which.json, which.name))), initial(11)},
        resident(2));
  };
  const auto wrong = [](const auto& change) {
    std::vector<MicroBatch> all = packed_batches(0);
    change(all[1].positions);
    return all;
  };
  const auto refused = [&](std::string_view why, const auto& change) {
    expect_refusal(io::ErrorKind::usage, {why}, [&] { session().step(wrong(change)); });
    expect_refusal(io::ErrorKind::usage, {why}, [&] { session().evaluate(wrong(change)); });
  };
  refused("positions are int64, not Float", [](torch::Tensor& p) { p = p.to(torch::kFloat); });
  refused("positions have the shape of ids", [](torch::Tensor& p) { p = p.narrow(1, 0, 15); });
  refused("position 7 of token 2 in row 1 comes after 1", [](torch::Tensor& p) { p[1][2] = 7; });
  refused("each row begins with a document", [](torch::Tensor& p) { p[0][0] = 1; });
}

}  // namespace
}  // namespace tierflow::testing

// Without one kind of wait the bits differ, or there is an error: what shows that the tests of the executor would
// notice.
#include "tests/swap/toy_run.h"

namespace tierflow::swap::toy {
namespace {

// Negative controls: without one kind of wait the chaotic device must show a difference or an error.
void expect_caught(const Case& with, TaskKind waiting, Lane forgets) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "the missing wait is a data race, which the sanitizer reports as it should";
#endif
  bool caught = false;
  for (std::uint64_t seed = 1; seed <= 8 && !caught; ++seed) {
    Case chaotic = with;
    chaotic.chaos = seed;
    const Toy toy = make_toy(false, 4);
    Run run(toy, chaotic);
    run.prepare();
    run.mutate = [&](Plan& plan) {
      for (Task& task : plan.tasks) {
        if (task.kind != waiting) continue;
        std::erase_if(task.dependencies,
                      [&](TaskId id) { return id >= plan.first_id && plan.tasks[id - plan.first_id].lane == forgets; });
      }
    };
    run.train(2);
    bool equal = false;
    run.compare(run_reference(toy, run.layout(), 2, with.micro_batches), equal);
    caught = !equal;
  }
  EXPECT_TRUE(caught) << task_name(waiting) << " no longer waits for " << lane_name(forgets);
}
const Case kSmall{.host = 1200 * 1024, .device = 3 * kMiB};
TEST(NegativeControl, ComputeWithoutWaitingForUploads) {
  expect_caught(kSmall, TaskKind::compute, Lane::upload);
}
TEST(NegativeControl, GradientTakenBeforeItIsSummed) {
  expect_caught(kSmall, TaskKind::download_gradient, Lane::compute);
}
TEST(NegativeControl, ActivationsSavedBeforeTheyAreComputed) {
  Case with = kSmall;
  with.swap_to_host = 100;
  expect_caught(with, TaskKind::save_activations, Lane::compute);
}
TEST(NegativeControl, ActivationsComputedWithBeforeTheyAreBack) {
  Case with = kSmall;
  with.swap_to_storage = 100;
  expect_caught(with, TaskKind::compute, Lane::upload);
  expect_caught(with, TaskKind::load_activations, Lane::disk_read);
}
TEST(NegativeControl, UploadBeforeTheUpdate) {
  expect_caught(kSmall, TaskKind::upload_hi, Lane::update);
}

const Case kOnDevice{.host = 1200 * 1024, .device = 8 * kMiB, .staged = false, .on_device = 1};
TEST(NegativeControl, DeviceUpdateBeforeItsStateIsThere) {
  expect_caught(kOnDevice, TaskKind::update_on_device, Lane::upload);
}
TEST(NegativeControl, DeviceUpdateBeforeTheGradientIsSummed) {
  Case slow = kOnDevice;  // the state comes before the gradient
  slow.host = 200 * kMiB;
  slow.device = 100 * kMiB;
  slow.pause = std::chrono::milliseconds(10);
  expect_caught(slow, TaskKind::update_on_device, Lane::compute);
}
TEST(NegativeControl, DownloadBeforeTheDeviceUpdate) {
  expect_caught(kOnDevice, TaskKind::download_state, Lane::update);
}

// Where the host runs ahead, a task that followed a computation starts while that is still to come, and only the wait
// for its event on the device holds it back. Without that wait, on one stream, the run must show it.
void expect_noticed(Case with, StreamId deaf) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "the missing wait is a data race, which the sanitizer reports as it should";
#endif
  with.deaf = deaf;
  bool noticed = false;
  for (std::uint64_t seed = 1; seed <= 8 && !noticed; ++seed) {
    with.chaos = seed;
    const Toy toy = make_toy(false, 4);
    Run run(toy, with);
    run.prepare();
    EXPECT_EQ(run.arrangement().gradient_slot != 0, with.rounds_first);
    run.train(2);
    bool equal = false;
    run.compare(run_reference(toy, run.layout(), 2, with.micro_batches), equal);
    noticed = !equal;
  }
  EXPECT_EQ(noticed, with.async);
}
void expect_noticed_where_the_host_runs_ahead(Case with, StreamId deaf) {
  if (open_toy_device(0, false)->name() == "cpu") expect_noticed(with, deaf);  // not at all
  with.async = true;
  expect_noticed(with, deaf);
}
TEST(NegativeControl, UploadsThatDoNotFollowComputation) {
  Case with = kSmall;  // the device's room for weights comes round
  with.host = 200 * kMiB;
  with.pause = std::chrono::milliseconds(3);
  expect_noticed_where_the_host_runs_ahead(with, StreamId::upload);
}
TEST(NegativeControl, DownloadsThatDoNotFollowComputation) {
  expect_noticed_where_the_host_runs_ahead(kSmall, StreamId::download);
}
TEST(NegativeControl, ActivationsThatAreSavedWithoutFollowingComputation) {
  Case with{.host = 200 * kMiB, .device = 100 * kMiB, .micro_batches = 3, .swap_to_host = 100};
  with.staged = false;
  expect_noticed_where_the_host_runs_ahead(with, StreamId::download);
}
TEST(NegativeControl, RoundingThatDoesNotFollowComputation) {
  Case with = kSmall;
  with.device = 4 * kMiB;
  with.rounds_first = true;
  expect_noticed_where_the_host_runs_ahead(with, StreamId::round);
}
TEST(NegativeControl, CopiesThatDoNotFollowTheRounding) {
  Case with = kSmall;
  with.device = 4 * kMiB;
  with.rounds_first = with.async = true;
  expect_noticed(with, StreamId::download);
}
TEST(NegativeControl, StateOnTheDeviceUpdatedBeforeTheGradientIsKept) {
  const Case with{.host = 200 * kMiB, .device = 16 * kMiB, .keeps_state = true};
  expect_caught(with, TaskKind::keep_gradient, Lane::compute);
}
TEST(NegativeControl, DeviceUpdatesThatDoNotFollowComputation) {
  Case with = kOnDevice;
  with.host = 200 * kMiB;
  with.device = 100 * kMiB;
  expect_noticed_where_the_host_runs_ahead(with, StreamId::update);
}

}  // namespace
}  // namespace tierflow::swap::toy

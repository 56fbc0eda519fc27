// The clock of the simulator, task by task: what each takes at rates that are written here.
#include "swap/simulator.h"

#include <gtest/gtest.h>

#include <tuple>

namespace tierflow::swap {
namespace {

constexpr MachineRates kMachine{.disk_read = 1000,
                                .disk_write = 500,
                                .upload = 250,
                                .download = 125,
                                .cast = 50,
                                .fill = 131072,
                                .measure = 25,
                                .checksum = 100,
                                .cores = 4,
                                .threads = 4};

class SimulatorClock : public ::testing::Test {
 protected:
  SimulatorClock()
      : layout_({{.name = "unit", .groups = {{.elements = kChunkQuantum, .state_bytes_element = 4, .precision = "a"}}}},
                {{.units = {0}}}, kChunkQuantum) {
    rates_.machine = kMachine;
    rates_.update = {{"a", 100}, {"b", 1}};
    rates_.device_update = {{"a", 200}};
    rates_.stages = {{.forward = 1,
                      .backward = 2,
                      .head = 3,
                      .evaluate = 4,
                      .forward_keeping = 5,
                      .backward_kept = 6,
                      .forward_swapping = 7,
                      .backward_swapped = 8}};
  }
  double seconds(std::vector<Task> tasks) const {
    Simulator simulator(layout_, rates_);
    Plan plan{
        .first_id = 5, .tasks = std::move(tasks), .visits = {{.fresh_gradient = {false}}, {.fresh_gradient = {true}}}};
    for (Task& task : plan.tasks) {
      task.stage = task.chunk = 0;
      if (task.bytes == 0) task.bytes = 1000;
      if (task.visit < 0) task.visit = 0;
    }
    simulator.append(std::move(plan));
    simulator.drain();
    return simulator.now();
  }

  Layout layout_;
  Rates rates_;
};

constexpr HostRef kWords{HostRef::Where::word_buffer, 0}, kState{HostRef::Where::state_buffer, 0};

TEST_F(SimulatorClock, MovesTakeTheirBytesByTheRateAndThenTheChecksum) {
  EXPECT_DOUBLE_EQ(seconds({{.kind = TaskKind::read_hi, .lane = Lane::disk_read}}), 1 + 10);
  EXPECT_DOUBLE_EQ(seconds({{.kind = TaskKind::write_hi, .lane = Lane::disk_write}}), 2);
  EXPECT_DOUBLE_EQ(seconds({{.kind = TaskKind::upload_hi, .lane = Lane::upload}}), 4);
  EXPECT_DOUBLE_EQ(seconds({{.kind = TaskKind::download_hi, .lane = Lane::download, .words = kWords}}), 8);
  EXPECT_DOUBLE_EQ(seconds({{.kind = TaskKind::download_gradient, .lane = Lane::download}}), 10);  // by elements
  // What the device updated, and activations on their way to storage, are stamped.
  EXPECT_DOUBLE_EQ(seconds({{.kind = TaskKind::download_hi, .lane = Lane::download, .words = kWords, .updated = true}}),
                   18);
  EXPECT_DOUBLE_EQ(
      seconds({{.kind = TaskKind::download_state, .lane = Lane::download, .state = kState, .updated = true}}), 18);
  EXPECT_DOUBLE_EQ(seconds({{.kind = TaskKind::download_hi,
                             .lane = Lane::download,
                             .words = {HostRef::Where::resident_hi, 0},
                             .updated = true}}),
                   8);
  EXPECT_DOUBLE_EQ(seconds({{.kind = TaskKind::save_activations,
                             .lane = Lane::download,
                             .words = {HostRef::Where::activation_buffer, 0}}}),
                   18);
  EXPECT_DOUBLE_EQ(seconds({{.kind = TaskKind::commit, .lane = Lane::commit}}), 0);
}

// The link goes on with the next while what came is stamped; what is stamped already waits for its turn.
TEST_F(SimulatorClock, TheLinkDoesNotWaitForChecksums) {
  const Task stamped{.kind = TaskKind::download_hi, .lane = Lane::download, .words = kWords, .updated = true};
  const Task plain{.kind = TaskKind::download_gradient, .lane = Lane::download};
  EXPECT_DOUBLE_EQ(seconds({stamped, stamped, stamped}), 8 + 3 * 10);
  EXPECT_DOUBLE_EQ(seconds({plain, stamped, plain}), 10 + 8 + 10);
  EXPECT_DOUBLE_EQ(seconds({stamped, plain, plain}), 8 + 10 + 10);
}

// Two copies move 250 and 125 bytes a second, an update 8 bytes of words and state and 2 of gradient an element.
TEST_F(SimulatorClock, HostMemoryIsSharedByAllWhoMoveBytesThere) {
  const Task up{.kind = TaskKind::upload_hi, .lane = Lane::upload},
      down{.kind = TaskKind::download_hi, .lane = Lane::download, .words = kWords, .bytes = 500};
  rates_.machine.compute_on_cores = false;
  rates_.machine.memory = 375;
  EXPECT_DOUBLE_EQ(seconds({up, down}), 4);
  rates_.machine.memory = 187.5;
  EXPECT_DOUBLE_EQ(seconds({up, down}), 8);
  EXPECT_DOUBLE_EQ(seconds({up}), 1000 / 187.5);
  const Task update{.kind = TaskKind::update, .lane = Lane::update};
  const double moved = 1000 + 2 * (1000 + static_cast<double>(layout_.chunks()[0].state_bytes));
  rates_.machine.memory = moved / 20;  // it takes 5 seconds of its own
  EXPECT_DOUBLE_EQ(seconds({update}), 20);
  rates_.machine.memory = 500;  // a read of a second, and then its checksum at 100 a second
  EXPECT_DOUBLE_EQ(seconds({{.kind = TaskKind::read_hi, .lane = Lane::disk_read}}), 2 + 10);
  rates_.machine.memory = 50;
  EXPECT_DOUBLE_EQ(seconds({{.kind = TaskKind::read_hi, .lane = Lane::disk_read}}), 20 + 20);
  EXPECT_DOUBLE_EQ(seconds({{.kind = TaskKind::write_hi, .lane = Lane::disk_write}}), 20);
}

TEST_F(SimulatorClock, FinishedUpdatesWaitForNothingElse) {
  Simulator simulator(layout_, rates_);
  simulator.append({.tasks = {{.kind = TaskKind::measure, .lane = Lane::update, .chunk = 0, .bytes = 1000},
                              {.kind = TaskKind::write_hi, .lane = Lane::disk_write, .bytes = 50000}}});
  EXPECT_TRUE(simulator.finish_updates());
  EXPECT_DOUBLE_EQ(simulator.now(), 20);
  simulator.drain();
  EXPECT_DOUBLE_EQ(simulator.now(), 100);
}

// As if it had just been made, whatever it left out before and whoever did not ask for records.
TEST_F(SimulatorClock, ANewBeginningRecordsAllAndNothingOfBefore) {
  const Plan plan{.tasks = {{.kind = TaskKind::measure, .lane = Lane::update, .chunk = 0, .bytes = 1000}}};
  Simulator simulator(layout_, rates_);
  simulator.append(plan);
  simulator.drain();
  simulator.restart();
  EXPECT_TRUE(simulator.take_records().empty());
  simulator.without_records();
  simulator.append(plan);
  simulator.drain();
  EXPECT_TRUE(simulator.take_records().empty());
  simulator.restart();
  simulator.append(plan);
  simulator.drain();
  EXPECT_EQ(simulator.take_records().size(), 1U);
}

// Both ways overlap where that is faster: never in less than the slower one takes, nor in more than one after the
// other.
TEST(DriveSeconds, AreWhatOneWayTakesAtLeastAndBothInTurnAtMost) {
  MachineRates machine{.disk_read = 1000, .disk_write = 500};
  for (const auto& [mixed, seconds] : {std::pair{0.0, 4.0}, {1.0, 4.0}, {1000.0, 2 + 2 / 3.0}, {1e9, 2.0}}) {
    machine.disk_mixed = mixed;
    EXPECT_DOUBLE_EQ(drive_seconds(machine, 2000, 1000), seconds) << mixed;
    EXPECT_DOUBLE_EQ(drive_seconds(machine, 2000, 0), 2) << mixed;
    EXPECT_LE(both_directions(machine), 1) << mixed;
  }
}

TEST_F(SimulatorClock, UpdatesTakeTheirElementsByTheRateOfTheirPrecision) {
  const auto update = [&](Task task, bool measures = false) {
    task.lane = Lane::update;
    task.measures = measures;
    return seconds({task});
  };
  EXPECT_DOUBLE_EQ(update({.kind = TaskKind::update}), 5);
  EXPECT_DOUBLE_EQ(update({.kind = TaskKind::update}, true), 5 + 20);  // and measures its gradient
  EXPECT_DOUBLE_EQ(update({.kind = TaskKind::catch_up}), 5);
  EXPECT_DOUBLE_EQ(update({.kind = TaskKind::measure}), 20);
  EXPECT_DOUBLE_EQ(update({.kind = TaskKind::update_on_device}), 2.5);
  EXPECT_DOUBLE_EQ(update({.kind = TaskKind::keep_gradient}), 2.5);
  EXPECT_DOUBLE_EQ(update({.kind = TaskKind::update, .found = true}, true), 5);  // measured on its way
  EXPECT_DOUBLE_EQ(update({.kind = TaskKind::measure, .found = true}), 0);
  EXPECT_DOUBLE_EQ(update({.kind = TaskKind::measure, .gradient = kWords, .found = true}), 10);
  // Words, state and gradients that go on to storage are stamped.
  EXPECT_DOUBLE_EQ(update({.kind = TaskKind::update, .words = kWords}), 5 + 10);
  EXPECT_DOUBLE_EQ(update({.kind = TaskKind::update, .state = kState}), 5 + 4.0 * kChunkQuantum / 100);
  EXPECT_DOUBLE_EQ(update({.kind = TaskKind::measure, .gradient = kWords}), 20 + 10);
  EXPECT_DOUBLE_EQ(update({.kind = TaskKind::update, .gradient = kWords}), 5);
  EXPECT_DOUBLE_EQ(update({.kind = TaskKind::measure, .words = kWords, .state = kState}), 20);
}

TEST_F(SimulatorClock, ComputeTakesWhatItsPassAndItsActivationsTake) {
  using enum Activations;
  for (const auto& [pass, activations, expected] : {std::tuple{Pass::forward, recompute, 1.0},
                                                    {Pass::forward, keep, 5.0},
                                                    {Pass::forward, swap, 7.0},
                                                    {Pass::backward, recompute, 2.0},
                                                    {Pass::backward, keep, 6.0},
                                                    {Pass::backward, swap, 8.0},
                                                    {Pass::head, recompute, 3.0},
                                                    {Pass::evaluate, recompute, 4.0}}) {
    const Task task{.pass = pass, .micro_batch = 0, .activations = activations};
    EXPECT_DOUBLE_EQ(seconds({task}), expected);
  }
  // The first micro-batch zeroes a gradient that holds nothing yet: four bytes an element.
  EXPECT_DOUBLE_EQ(seconds({{.pass = Pass::head, .micro_batch = 0, .visit = 1}}), 3 + 2);
  EXPECT_DOUBLE_EQ(seconds({{.pass = Pass::head, .micro_batch = 1, .visit = 1}}), 3);
}

TEST_F(SimulatorClock, WorkWithoutARateTakesNoTime) {
  rates_.machine = {};
  rates_.update.clear();
  rates_.device_update.clear();
  for (const auto& [kind, lane] : {std::pair{TaskKind::read_hi, Lane::disk_read},
                                   {TaskKind::write_hi, Lane::disk_write},
                                   {TaskKind::upload_hi, Lane::upload},
                                   {TaskKind::download_gradient, Lane::download},
                                   {TaskKind::update, Lane::update},
                                   {TaskKind::update_on_device, Lane::update}})
    EXPECT_EQ(seconds({{.kind = kind, .lane = lane}}), 0);
}

TEST_F(SimulatorClock, ALaneDoesOneThingAfterTheOther) {
  const Task write{.kind = TaskKind::write_hi, .lane = Lane::disk_write},
      upload{.kind = TaskKind::upload_hi, .lane = Lane::upload};
  EXPECT_DOUBLE_EQ(seconds({write, write, write}), 6);
  EXPECT_DOUBLE_EQ(seconds({upload, upload}), 8);
  EXPECT_DOUBLE_EQ(seconds({write, upload}), 4);  // two lanes at once
  Task after = upload;
  after.dependencies = {5, 2};  // the first task here; one of an earlier plan
  EXPECT_DOUBLE_EQ(seconds({write, after}), 6);
  // While one is verified, the next is read.
  const Task read{.kind = TaskKind::read_hi, .lane = Lane::disk_read};
  EXPECT_DOUBLE_EQ(seconds({read, read}), 1 + 10 + 10);
}

// A search that has a shorter step already need not know how much longer this one takes.
TEST_F(SimulatorClock, EndsWhereItPassesAGivenTime) {
  Plan plan{.tasks = {{.kind = TaskKind::measure, .lane = Lane::update, .chunk = 0, .bytes = 1000},
                      {.kind = TaskKind::measure, .lane = Lane::update, .chunk = 0, .bytes = 1000}}};
  for (const auto& [until, done, now] : {std::tuple{50.0, true, 40.0},
                                         {40.0, true, 40.0},
                                         {30.0, false, 40.0},
                                         {20.0, false, 40.0},
                                         {10.0, false, 20.0}}) {
    Simulator simulator(layout_, rates_);
    simulator.append(plan);
    EXPECT_EQ(simulator.finish_updates(until), done) << until;
    EXPECT_DOUBLE_EQ(simulator.now(), now) << until;
  }
}

TEST_F(SimulatorClock, ReadsAndWritesAtOnceShareTheDrive) {
  rates_.machine.checksum = 0;
  const std::vector<Task> both = {{.kind = TaskKind::read_hi, .lane = Lane::disk_read, .bytes = 2000},
                                  {.kind = TaskKind::write_hi, .lane = Lane::disk_write}};
  EXPECT_DOUBLE_EQ(seconds(both), 4);  // two seconds each at half the speed
  // A drive that moves 1000 bytes a second, both directions together: 0.75 of what each does alone.
  rates_.machine.disk_mixed = 1000;
  EXPECT_DOUBLE_EQ(seconds(both), 2 / 0.75);
  rates_.machine.disk_mixed = 1e9;  // never faster than alone
  EXPECT_DOUBLE_EQ(seconds(both), 2);
}

TEST_F(SimulatorClock, ComputingOnTheCpuTakesCoresFromTheUpdate) {
  rates_.update["a"] = 500;
  const std::vector<Task> both = {{.pass = Pass::forward, .micro_batch = 1},
                                  {.kind = TaskKind::update, .lane = Lane::update}};
  EXPECT_DOUBLE_EQ(seconds(both), 2);  // one second each, of eight cores that four are
  rates_.machine.threads = 2;
  EXPECT_DOUBLE_EQ(seconds(both), 1);
  rates_.machine.threads = 4;
  rates_.machine.compute_on_cores = false;
  EXPECT_DOUBLE_EQ(seconds(both), 1);
  rates_.machine = {};  // one thread on one core
  EXPECT_DOUBLE_EQ(seconds(both), 2);
}

TEST_F(SimulatorClock, AnUpdateOnAGpuTakesNoCores) {
  const std::vector<Task> both = {{.kind = TaskKind::read_hi, .lane = Lane::disk_read},  // verified on a core: 10 s
                                  {.kind = TaskKind::update_on_device, .lane = Lane::update}};
  rates_.machine.cores = rates_.machine.threads = 1;
  rates_.machine.compute_on_cores = false;
  EXPECT_DOUBLE_EQ(seconds(both), 1 + 10);
  rates_.machine.compute_on_cores = true;
  EXPECT_GT(seconds(both), 1 + 10);
}

}  // namespace
}  // namespace tierflow::swap

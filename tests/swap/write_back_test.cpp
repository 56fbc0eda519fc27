// What differs from the store is written, in RAM and on the device, and nothing else is; gradients are what the device
// had, whatever the step before knew of zeros.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "swap/arrange.h"
#include "swap/executor.h"
#include "swap/planner.h"
#include "tests/support/forwarding_device.h"
#include "tests/support/temp_dir.h"
#include "tests/swap/faulty_store.h"
#include "tests/swap/sparse_stages.h"

namespace tierflow::swap {
namespace {

using testing::Fault;

// Whatever is updated consists of `brings` afterwards.
struct Filling final : UpdateWork {
  std::byte brings{};
  bool zeros = false;
  std::uint16_t expected = 0;  // every word of each gradient that is applied
  int updated = 0, unexpected = 0;

  std::vector<ElementRange> zero_gradient(const Chunk& chunk) const override {
    return zeros ? std::vector<ElementRange>{{0, chunk.elements}} : std::vector<ElementRange>{};
  }
  io::Error measure(const Chunk&, std::span<const std::byte>) override { return {}; }
  io::Error keep_gradient(const Chunk&, Device&, const DeviceUpdate&) override { return {}; }
  io::Error update(const Chunk& chunk, std::span<const std::byte> gradient, std::span<std::byte> words,
                   std::span<std::byte> state) override {
    const auto* first = reinterpret_cast<const std::uint16_t*>(gradient.data());
    ++updated;
    unexpected += std::all_of(first, first + chunk.elements, [this](auto word) { return word == expected; }) ? 0 : 1;
    return catch_up(chunk, words, state);
  }
  io::Error catch_up(const Chunk&, std::span<std::byte> words, std::span<std::byte> state) override {
    std::ranges::fill(words, brings);
    std::ranges::fill(state, brings);
    return {};
  }
  io::Error update_on_device(const Chunk& chunk, Device&, const DeviceUpdate& at) override {
    std::fill_n(at.state, chunk.state_bytes, brings);
    return {};
  }
};

struct LosableDevice final : testing::ForwardingDevice {
  bool gone = false;
  LosableDevice() : ForwardingDevice(open_cpu_device({.chaos_seed = 3})) {}
  // Of a device that is gone nothing is under way any more.
  io::Error synchronize(const Event& event) override {
    io::Error error = ForwardingDevice::synchronize(event);
    if (gone) return {.kind = io::ErrorKind::io, .detail = "the device is gone"};
    return error;
  }
};

class WriteBack : public ::testing::Test {
 protected:
  void prepare(ArrangeRequest request) {
    if (request.host_budget == 0) request.host_budget = 64 << 20;
    request.device_budget = 64 << 20;
    executor_.reset();
    if (store_ != nullptr) store_->remove_files();
    arrangement_ = arrange(layout_, request).value();
    store_ = Store::create(over_faults(folder_.path(), plan_, 2), layout_).value();
    executor_ = Executor::create(device_, store_.get(), layout_, arrangement_).value();
    planner_ = std::make_unique<Planner>(layout_, arrangement_);
    for (const Chunk& chunk : layout_.chunks())
      for (const ExtentKind kind : {ExtentKind::hi, ExtentKind::state}) write(kind, chunk.id, 1);
  }
  void write(ExtentKind kind, int chunk, int value) {
    ASSERT_FALSE(executor_->access(kind, chunk, /*writes=*/true, [value](std::span<std::byte> bytes) {
      std::ranges::fill(bytes, static_cast<std::byte>(value));
    }));
  }
  bool stores(ExtentKind kind, int chunk, int value) const {
    auto bytes = store_->fetch(kind, chunk);
    return bytes.ok() && std::ranges::all_of(bytes->bytes().first(store_->extent_bytes(kind, chunk)),
                                             [value](std::byte byte) { return byte == static_cast<std::byte>(value); });
  }
  std::uint64_t written() const { return store_->drives().front().bytes_written; }
  // All of each gradient on the device is 1.
  void step(bool pending, bool commits = false) {
    executor_->append(planner_->train_step(pending, commits), work_);
    for (const auto& [stage, pass] : {std::pair{0, Pass::forward}, {1, Pass::head}, {0, Pass::backward}}) {
      auto entered = executor_->enter(stage, pass, 0);
      ASSERT_TRUE(entered.ok()) << entered.error().message();
      if (pass != Pass::forward)
        std::fill_n(reinterpret_cast<float*>(entered->arena + entered->visit->gradients[0]),
                    layout_.gradient_bytes(stage) / 4, 1.0F);
      ASSERT_FALSE(executor_->leave());
    }
    ASSERT_FALSE(executor_->finish_updates());
  }

  static constexpr int kHeld = 4;  // a chunk of the last unit
  const Layout layout_ = sparse_stages();
  const testing::TempDir folder_;
  std::shared_ptr<testing::FaultPlan> plan_ = std::make_shared<testing::FaultPlan>();
  LosableDevice device_;
  Arrangement arrangement_;
  std::unique_ptr<Store> store_;
  std::unique_ptr<Executor> executor_;
  std::unique_ptr<Planner> planner_;
  std::shared_ptr<Filling> work_ = std::make_shared<Filling>();
};

TEST_F(WriteBack, WritesWhatCaughtUp) {
  ASSERT_NO_FATAL_FAILURE(prepare({}));
  ASSERT_FALSE(executor_->write_back());
  const int chunk = layout_.sparse_chunks()[1];
  SparseChunks sparse;
  sparse.missed.assign(layout_.chunks().size(), false);
  sparse.missed[chunk] = true;
  work_->brings = std::byte{7};
  executor_->append(planner_->flush(false, sparse), work_);
  ASSERT_FALSE(executor_->drain());
  ASSERT_FALSE(executor_->write_back());
  for (const ExtentKind kind : {ExtentKind::hi, ExtentKind::state}) EXPECT_TRUE(stores(kind, chunk, 7));
}

TEST_F(WriteBack, WritesNothingThatMatchesTheStore) {
  ASSERT_NO_FATAL_FAILURE(prepare({.state_on_device = true}));
  executor_->matches_store();
  const std::uint64_t before = written();
  ASSERT_FALSE(executor_->write_back());
  EXPECT_EQ(written(), before);
}

TEST_F(WriteBack, WritesStateOnTheDeviceThatTheClientChanged) {
  ASSERT_NO_FATAL_FAILURE(prepare({.state_on_device = true}));
  ASSERT_NE(arrangement_.device_place(ExtentKind::state, kHeld), kNowhere);
  executor_->matches_store();
  for (const int chunk : {kHeld, kHeld + 1}) write(ExtentKind::state, chunk, chunk);
  for (const int chunk : {kHeld, kHeld + 1})
    ASSERT_FALSE(executor_->access(ExtentKind::state, chunk, /*writes=*/false, [chunk](std::span<std::byte> bytes) {
      EXPECT_TRUE(
          std::ranges::all_of(bytes, [chunk](std::byte byte) { return byte == static_cast<std::byte>(chunk); }));
    }));
  ASSERT_FALSE(executor_->write_back());
  for (const int chunk : {kHeld, kHeld + 1}) EXPECT_TRUE(stores(ExtentKind::state, chunk, chunk));
}

TEST_F(WriteBack, WritesStateOnTheDeviceThatACommitHasNot) {
  ASSERT_NO_FATAL_FAILURE(prepare({.state_on_device = true}));
  work_->brings = std::byte{7};
  ASSERT_NO_FATAL_FAILURE(step(false));
  ASSERT_NO_FATAL_FAILURE(step(true, /*commits=*/true));
  ASSERT_FALSE(executor_->drain());
  EXPECT_TRUE(stores(ExtentKind::state, kHeld, 7));
  const std::uint64_t before = written();
  ASSERT_FALSE(executor_->write_back());
  EXPECT_EQ(written(), before);
  work_->brings = std::byte{9};
  executor_->append(planner_->flush(), work_);
  ASSERT_FALSE(executor_->drain());
  ASSERT_FALSE(executor_->write_back());
  EXPECT_TRUE(stores(ExtentKind::state, kHeld, 9));
}

TEST_F(WriteBack, SaysWhatWasNotWrittenFromTheDevice) {
  ASSERT_NO_FATAL_FAILURE(prepare({.state_on_device = true}));
  executor_->matches_store();
  write(ExtentKind::state, kHeld, 5);
  device_.gone = true;
  EXPECT_EQ(executor_->write_back().detail, "the device is gone");
  device_.gone = false;
  write(ExtentKind::state, kHeld, 6);
  plan_->set({.kind = Fault::Kind::error, .action = io::Action::write, .sticky = true});
  EXPECT_EQ(executor_->write_back().kind, io::ErrorKind::io);
}

TEST_F(WriteBack, WhatCannotBeReadFromTheDeviceIsNotHandedOut) {
  ASSERT_NO_FATAL_FAILURE(prepare({.state_on_device = true}));
  device_.gone = true;
  const io::Error error = executor_->access(ExtentKind::state, kHeld, /*writes=*/false,
                                            [](std::span<std::byte>) { ADD_FAILURE() << "nothing came"; });
  EXPECT_EQ(error.detail, "the device is gone");
}

TEST_F(WriteBack, NoMoreThanAFewWritesAreInFlight) {
  ASSERT_NO_FATAL_FAILURE(prepare({}));
  plan_->set({.kind = Fault::Kind::hold, .action = io::Action::write, .sticky = true});
  io::Error error;
  std::thread writes([&] { error = executor_->write_back(); });
  for (int i = 0; i < 2000 && plan_->hits() < 4; ++i) std::this_thread::sleep_for(std::chrono::milliseconds{1});
  std::this_thread::sleep_for(std::chrono::milliseconds{5});
  EXPECT_EQ(plan_->hits(), 4U);
  plan_->release();
  plan_->clear();
  writes.join();
  EXPECT_FALSE(error) << error.message();
}

TEST_F(WriteBack, AnExtentWithoutAPlaceIsRefused) {
  ASSERT_NO_FATAL_FAILURE(prepare({}));
  ASSERT_EQ(arrangement_.word_buffers, 0);
  for (const bool writes : {false, true}) {
    const io::Error error = executor_->access(ExtentKind::gradient_low, 0, writes,
                                              [](std::span<std::byte>) { ADD_FAILURE() << "there is no place"; });
    EXPECT_EQ(error.kind, io::ErrorKind::usage) << error.message();
  }
  EXPECT_FALSE(executor_->failed());
}

// Of all chunks in one step, of none in the next, and again; gradients pass through storage and through RAM.
TEST_F(WriteBack, GradientsAreZerosOnlyInTheStepThatKnowsThem) {
  for (const std::uint64_t host : {std::uint64_t{600} << 10, std::uint64_t{64} << 20}) {
    ASSERT_NO_FATAL_FAILURE(prepare({.host_budget = host}));
    EXPECT_EQ(arrangement_.gradient_resident[kHeld], host > 1 << 20);
    for (int at = 0; at < 3; ++at) {
      work_->zeros = at % 2 == 0;
      work_->expected = work_->zeros ? 0x3f80 : 0;  // of the step before
      ASSERT_NO_FATAL_FAILURE(step(at > 0));
    }
  }
  EXPECT_EQ(work_->updated, 2 * 2 * static_cast<int>(layout_.chunks().size()));
  EXPECT_EQ(work_->unexpected, 0);
}

}  // namespace
}  // namespace tierflow::swap

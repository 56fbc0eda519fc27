// A step's work on one chunk: what its tensors are updated with, what is counted, and what a device may refuse.
#include "runtime/state/optimizer_work.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "runtime/planning/update_scratch.h"
#include "tests/optim/fixture.h"
#include "tests/support/forwarding_device.h"

namespace tierflow {
namespace {

// A device that no runtime knows.
class StrangeDevice final : public testing::ForwardingDevice {
 public:
  void enqueue(StreamId stream, std::function<void(const swap::DeviceQueue&)> work) override {
    ForwardingDevice::enqueue(stream, [work = std::move(work)](const swap::DeviceQueue&) { work({.device = 99}); });
  }
};

class OptimizerWorkTest : public ::testing::Test {
 protected:
  OptimizerWorkTest() {
    spec_.units.push_back({.name = "unit",
                           .tensors = {{.name = "norm", .shape = {300}, .decays = false},
                                       {.name = "weight", .shape = {60, 100}, .lr_scale = 4}}});
    spec_.stages.push_back({.kind = StageKind::block, .units = {0}});
    model_ = pack(spec_, Precision::fp32_master_adam8);
    layout_.emplace(std::vector{model_.units[0].shape}, model_.stages, swap::kChunkQuantum);
    const std::uint64_t elements = chunk().elements;
    gradient_ = optim::gradients(elements, 3);
    words_.assign(elements, 0x3f80);
    state_.assign(chunk().state_bytes, 0);
    scratch_.resize(update_scratch_bytes(model_, *layout_));
  }

  const swap::Chunk& chunk() const { return layout_->chunks().front(); }
  std::span<const std::byte> gradient() const { return std::as_bytes(std::span(gradient_).first(chunk().elements)); }
  std::span<std::byte> words() { return std::as_writable_bytes(std::span(words_)); }
  std::span<std::byte> state() { return std::as_writable_bytes(std::span(state_)); }
  swap::DeviceUpdate on_device() {
    return {.gradient = gradient_.data(),
            .words = words_.data(),
            .state = state().data(),
            .scratch = reinterpret_cast<std::byte*>(scratch_.data())};
  }
  OptimizerWork work(bool owed = false) {
    return {model_, *layout_, threads_, {owed}, true, {.lr = 1e-2F}, {.lr = 3e-2F}, 0.5F, 7};
  }

  ModelSpec spec_;
  PackedModel model_;
  std::optional<swap::Layout> layout_;
  UpdateThreads threads_{2};
  optim::Array<std::uint16_t> gradient_, words_;
  optim::Array<std::uint8_t> state_, scratch_;
};

TEST_F(OptimizerWorkTest, EachTensorHasItsOwnRateAndDecay) {
  for (const bool owed : {false, true}) {
    std::ranges::fill(words_, 0x3f80);
    std::ranges::fill(state_, 0);
    OptimizerWork step = work(owed);
    EXPECT_FALSE(step.update(chunk(), gradient(), words(), state()));
    EXPECT_EQ(step.updated_at_once(), owed ? 0U : 6300U);
    EXPECT_EQ(step.updated_deferred(), owed ? 6300U : 0U);
    for (const TensorPiece& piece : pieces_of(model_, chunk())) {
      const bool is_norm = piece.tensor->tensor == 0;
      optim::StateArrays s(optim::MasterFormat::split, optim::MomentFormat::block8, piece.elements);
      std::ranges::fill(s.hi, 0x3f80);
      const float lr = owed ? 3e-2F : 1e-2F;
      adamw_update({.lr = is_norm ? lr : 4 * lr, .weight_decay = is_norm ? 0.0F : 0.5F},
                   gradient_.data() + piece.in_chunk, s.view(), piece.elements);
      EXPECT_EQ(std::memcmp(words_.data() + piece.in_chunk, s.hi.data(), 2 * piece.elements), 0) << is_norm << owed;
      EXPECT_EQ(std::memcmp(state_.data() + 2 * piece.in_chunk, s.lo.data(), 2 * piece.elements), 0) << is_norm << owed;
    }
  }
}

TEST_F(OptimizerWorkTest, CountsWhatADeviceUpdated) {
  const auto device = swap::open_cpu_device();
  gradient_[700] = 0x7f80;
  OptimizerWork step = work();
  EXPECT_FALSE(step.update_on_device(chunk(), *device, on_device()));
  EXPECT_EQ(step.updated_at_once(), 6300 - optim::kBlock);
  EXPECT_FALSE(step.finite());
}

TEST_F(OptimizerWorkTest, ASumThatIsNotFiniteIsNoticedOnItsWay) {
  const UpdateScratch at = measured_of(chunk().elements);
  for (const double odd : {1.0, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    std::vector<std::byte> found(at.bytes);
    at.sums_at(found.data())[0] = 8;
    at.sums_at(found.data())[at.segments - 1] += odd;
    OptimizerWork step = work();
    EXPECT_FALSE(step.take_measured(chunk(), found));
    EXPECT_EQ(step.finite(), odd == 1.0) << odd;
  }
}

TEST_F(OptimizerWorkTest, WhatTheDeviceRefusesEndsTheRun) {
  StrangeDevice device;
  OptimizerWork step = work();
  auto* const found = reinterpret_cast<std::byte*>(scratch_.data());
  step.enqueue_measuring(chunk(), device, swap::StreamId::round, gradient_.data(), found);
  ASSERT_FALSE(device.synchronize(device.record(swap::StreamId::round)));
  for (const io::Error& error : {step.take_measured(chunk(), {found, measured_of(chunk().elements).bytes}),
                                 work().update_on_device(chunk(), device, on_device())}) {
    EXPECT_EQ(error.kind, io::ErrorKind::io);
    EXPECT_EQ(error.operation, "update on the device");
    EXPECT_EQ(error.path, "unit");
    EXPECT_NE(error.detail.find("CUDA"), std::string::npos) << error.detail;
  }
}

}  // namespace
}  // namespace tierflow

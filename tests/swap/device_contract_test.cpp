// One contract over every device (devices_under_test.h): the CPU's, the CPU's with delays and poison, and CUDA's where
// there is one; in a program of its own CUDA's over the stand-in for its runtime.
#include <gtest/gtest.h>

#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>
#include <future>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "swap/host_memory.h"
#include "tests/swap/devices_under_test.h"

namespace tierflow::swap {
namespace {

class DeviceContract : public ::testing::TestWithParam<DeviceUnderTest> {
 protected:
  void SetUp() override {
    device_ = GetParam().open();
    if (device_ == nullptr) GTEST_SKIP() << "no CUDA device here";
    auto memory = HostMemory::create(std::vector<std::size_t>(3, kBytes), *device_);
    ASSERT_TRUE(memory.ok());
    memory_ = std::move(memory).value();
    arena_ = device_->allocate(kBytes * 2).value();
  }
  static constexpr std::size_t kBytes = 3 << 20;

  std::unique_ptr<Device> device_;
  std::unique_ptr<HostMemory> memory_;
  io::Buffer arena_;
};

TEST_P(DeviceContract, BytesComeBackThroughBothStreams) {
  const auto out = memory_->buffer(0), back = memory_->buffer(1);
  for (int round = 0; round < 5; ++round) {
    for (std::size_t i = 0; i < kBytes; ++i) out[i] = static_cast<std::byte>(i * 7 + round);
    device_->copy_to_device(StreamId::upload, arena_.data(), out.data(), kBytes);
    device_->wait(StreamId::download, device_->record(StreamId::upload));
    device_->copy_to_host(StreamId::download, back.data(), arena_.data(), kBytes);
    const Event arrived = device_->record(StreamId::download);
    ASSERT_FALSE(device_->synchronize(arrived));
    ASSERT_EQ(std::memcmp(out.data(), back.data(), kBytes), 0) << "round " << round;
  }
}

TEST_P(DeviceContract, ComputeWaitsForUploads) {
  const auto out = memory_->buffer(0), back = memory_->buffer(1);
  std::fill(out.begin(), out.end(), std::byte{42});
  device_->copy_to_device(StreamId::upload, arena_.data(), out.data(), kBytes);
  device_->wait(StreamId::compute, device_->record(StreamId::upload));
  device_->copy_to_host(StreamId::compute, back.data(), arena_.data(), kBytes);
  ASSERT_FALSE(device_->synchronize(device_->record(StreamId::compute)));
  EXPECT_EQ(back.front(), std::byte{42});
  EXPECT_EQ(back.back(), std::byte{42});
}

TEST_P(DeviceContract, GradientsRoundToNearestEven) {
  std::vector<float> values;
  std::mt19937 random(3);
  for (int i = 0; i < 100003; ++i) values.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(random())));
  for (const float special : {0.0F, -0.0F, INFINITY, -INFINITY, std::nanf(""), 1.00390625F, 1.01171875F,
                              std::numeric_limits<float>::denorm_min(), std::numeric_limits<float>::max()})
    values.push_back(special);
  const auto out = memory_->buffer(0).first(4 * values.size());
  const auto back = memory_->buffer(1).first(2 * values.size());
  std::memcpy(out.data(), values.data(), out.size());
  device_->copy_to_device(StreamId::upload, arena_.data(), out.data(), out.size());
  device_->wait(StreamId::download, device_->record(StreamId::upload));
  device_->gradient_to_host(StreamId::download, reinterpret_cast<std::uint16_t*>(back.data()),
                            reinterpret_cast<const float*>(arena_.data()), values.size());
  ASSERT_FALSE(device_->synchronize(device_->record(StreamId::download)));
  for (std::size_t i = 0; i < values.size(); ++i) {
    std::uint16_t got = 0;
    std::memcpy(&got, back.data() + 2 * i, 2);
    const float rounded = std::bit_cast<float>(static_cast<std::uint32_t>(got) << 16);
    if (std::isnan(values[i])) {
      ASSERT_TRUE(std::isnan(rounded));
      continue;
    }
    // The nearest of the two neighbours in double; a tie goes to the even one.
    const std::uint32_t down_bits = std::bit_cast<std::uint32_t>(values[i]) & 0xffff0000U;
    const double exact = values[i], down = std::bit_cast<float>(down_bits);
    const float up_value = std::bit_cast<float>(down_bits + 0x10000U);
    const double up =
        std::isinf(up_value) && std::isfinite(exact) ? std::copysign(std::ldexp(1.0, 128), exact) : up_value;
    const double to_down = std::abs(exact - down), to_up = std::abs(up - exact);
    const bool takes_down =
        !std::isfinite(exact) || to_down < to_up || (to_down == to_up && (down_bits >> 16) % 2 == 0);
    ASSERT_EQ(got, (takes_down ? down_bits : down_bits + 0x10000U) >> 16) << values[i];
  }
}

// Rounded on the device as on the way from it, and what a client enqueues has its turn between.
TEST_P(DeviceContract, TheUpdateStreamRoundsAndKeepsItsOrder) {
  std::vector<float> values;
  std::mt19937 random(4);
  for (int i = 0; i < 100003; ++i) values.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(random())));
  const auto out = memory_->buffer(0).first(4 * values.size()), one = memory_->buffer(1).first(2 * values.size()),
             other = memory_->buffer(2).first(2 * values.size());
  std::memcpy(out.data(), values.data(), out.size());
  const auto* sums = reinterpret_cast<const float*>(arena_.data());
  std::byte* rounded = arena_.data() + (out.size() + 4095) / 4096 * 4096;
  device_->copy_to_device(StreamId::upload, arena_.data(), out.data(), out.size());
  const Event uploaded = device_->record(StreamId::upload);
  device_->wait(StreamId::download, uploaded);
  device_->gradient_to_host(StreamId::download, reinterpret_cast<std::uint16_t*>(one.data()), sums, values.size());
  device_->wait(StreamId::update, uploaded);
  device_->round_gradient(StreamId::update, reinterpret_cast<std::uint16_t*>(rounded), sums, values.size());
  int calls = 0;
  device_->enqueue(StreamId::update, [&](const DeviceQueue& queue) {
    ++calls;
    EXPECT_EQ(queue.device == DeviceQueue::kHost, device_->name() == "cpu");
    EXPECT_EQ(queue.stream == nullptr, device_->name() == "cpu");
    if (queue.device == DeviceQueue::kHost) rounded[0] ^= std::byte{1};
  });
  device_->copy_to_host(StreamId::update, other.data(), rounded, other.size());
  ASSERT_FALSE(device_->synchronize(device_->record(StreamId::update)));
  ASSERT_FALSE(device_->synchronize(device_->record(StreamId::download)));
  EXPECT_EQ(calls, 1);
  if (device_->name() == "cpu") other[0] ^= std::byte{1};
  EXPECT_EQ(std::memcmp(one.data(), other.data(), one.size()), 0);
}

TEST_P(DeviceContract, ComputationHasItsTurnBehindWhatItWaitsFor) {
  const auto out = memory_->buffer(0), back = memory_->buffer(1);
  std::fill(out.begin(), out.end(), std::byte{42});
  device_->copy_to_device(StreamId::upload, arena_.data(), out.data(), kBytes);
  device_->wait(StreamId::compute, device_->record(StreamId::upload));
  device_->enqueue(StreamId::compute, [&](const DeviceQueue& queue) {
    if (queue.device == DeviceQueue::kHost) arena_.data()[0] ^= std::byte{1};
  });
  device_->wait(StreamId::download, device_->record(StreamId::compute));
  device_->copy_to_host(StreamId::download, back.data(), arena_.data(), kBytes);
  ASSERT_FALSE(device_->synchronize(device_->record(StreamId::download)));
  EXPECT_EQ(back.front(), std::byte{42} ^ (device_->name() == "cpu" ? std::byte{1} : std::byte{0}));
  EXPECT_EQ(back.back(), std::byte{42});
}

TEST_P(DeviceContract, TimedEventsTellWhatTookHowLong) {
  for (const StreamId stream :
       {StreamId::upload, StreamId::download, StreamId::compute, StreamId::update, StreamId::round}) {
    const Event before = device_->record_timed(stream);
    device_->copy_to_host(stream, memory_->buffer(0).data(), arena_.data(), kBytes);
    device_->enqueue(stream, [](const DeviceQueue& queue) {
      if (queue.device == DeviceQueue::kHost) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    });
    const Event after = device_->record_timed(stream);
    ASSERT_FALSE(device_->synchronize(after));
    const auto forth = device_->seconds_between(before, after), back = device_->seconds_between(after, before);
    ASSERT_TRUE(forth && back);
    EXPECT_GE(*forth, device_->name() == "cpu" ? 0.02 : 1e-6);
    EXPECT_LT(*forth, 20);
    EXPECT_LE(*back, 0);
    EXPECT_FALSE(device_->seconds_between({}, after));
  }
}

TEST_P(DeviceContract, AnEmptyAllocationIsFine) {
  EXPECT_TRUE(device_->allocate(0).ok());
}

// Memory that was never pinned, in part or at all: slower, and the same bytes.
TEST_P(DeviceContract, MemoryThatIsNotPinnedIsAsGood) {
  std::vector<float> values(100003);
  std::mt19937 random(6);
  for (float& value : values) value = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
  std::vector<float> back(values.size());
  std::vector<std::uint16_t> rounded(values.size());
  const auto* sums = reinterpret_cast<const float*>(arena_.data());
  for (int round = 0; round < 3; ++round) {
    values[0] = static_cast<float>(round);
    device_->copy_to_device(StreamId::upload, arena_.data(), reinterpret_cast<const std::byte*>(values.data()),
                            4 * values.size());
    ASSERT_FALSE(device_->synchronize(device_->record(StreamId::upload)));
    device_->gradient_to_host(StreamId::download, rounded.data(), sums, values.size());
    device_->copy_to_host(StreamId::download, reinterpret_cast<std::byte*>(back.data()), arena_.data(),
                          4 * values.size());
    ASSERT_FALSE(device_->synchronize(device_->record(StreamId::download)));
    ASSERT_EQ(std::memcmp(values.data(), back.data(), 4 * values.size()), 0);
    for (std::size_t i = 0; i < values.size(); ++i) ASSERT_EQ(rounded[i], gradient_to_bf16(values[i])) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, DeviceContract, ::testing::ValuesIn(devices_under_test()),
                         [](const auto& info) { return info.param.name; });

// The caller goes on while its computation waits.
TEST(AsyncCompute, WaitingForAnEventDoesNotHoldTheCaller) {
  for (const std::uint64_t chaos : {0, 5}) {
    const auto device = open_cpu_device({.chaos_seed = chaos, .async_compute = true});
    std::promise<void> may_go_on;
    device->enqueue(StreamId::upload, [&](const DeviceQueue&) { may_go_on.get_future().wait(); });
    const Event uploaded = device->record_timed(StreamId::upload);
    device->wait(StreamId::compute, uploaded);
    bool computed = false;
    device->enqueue(StreamId::compute, [&](const DeviceQueue&) { computed = true; });
    const Event ended = device->record_timed(StreamId::compute);
    const Event happened = device->record_timed(StreamId::download);
    ASSERT_FALSE(device->synchronize(happened));
    EXPECT_FALSE(device->seconds_between(uploaded, ended));
    EXPECT_FALSE(device->seconds_between(happened, ended));
    EXPECT_FALSE(device->seconds_between(ended, happened));
    may_go_on.set_value();
    ASSERT_FALSE(device->synchronize(ended));
    EXPECT_TRUE(computed);
    EXPECT_GE(device->seconds_between(uploaded, ended).value_or(-1), 0);
  }
}

}  // namespace
}  // namespace tierflow::swap

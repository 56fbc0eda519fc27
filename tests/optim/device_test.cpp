// The update on a GPU, or over the stand-in for CUDA, has the bits of the update on the CPU. Skips without either.
#include <gtest/gtest.h>

#include <optional>
#include <stdexcept>

#include "optim/adamw_device.h"
#include "tests/optim/device_arrays.h"
#include "tests/optim/variants.h"

namespace tierflow::optim {
namespace {

TEST(DeviceUpdateBuild, WithoutCudaItSaysSo) {
  if (device_update_is_built()) GTEST_SKIP() << "this build has CUDA";
  try {
    split_master_on_device(nullptr, nullptr, nullptr, 0, {});
    FAIL();
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find("no CUDA"), std::string::npos);
  }
}

// A span of the host's, and its copy on the device.
struct Mirror {
  Mirror(void* host_, std::size_t bytes_) : host(host_), bytes(bytes_), device(bytes_ + 64) { device.set(host, bytes); }
  void bring_back() { device.get(host, bytes); }
  void* host;
  std::size_t bytes;
  DeviceArray device;
};

struct StateMirror {
  StateMirror(const State& state, std::size_t n) : on_device(state) {
    on_device.hi = add<std::uint16_t>(state.hi, 2 * n);
    on_device.lo = add<std::uint16_t>(state.lo, 2 * n);
    for (Moment* moment : {&on_device.m, &on_device.v}) {
      const std::size_t size = moment->format == MomentFormat::block8 ? 1
                               : moment->format == MomentFormat::bf16 ? 2
                                                                      : 4;
      moment->values = add<void>(moment->values, size * n);
      moment->absmax = add<float>(moment->absmax, 4 * blocks_of(n));
    }
  }
  template <class T>
  T* add(T* host, std::size_t bytes) {
    if (host == nullptr) return nullptr;
    parts.emplace_back(host, bytes);
    return parts.back().device.as<T>();
  }
  void bring_back() {
    for (Mirror& part : parts) part.bring_back();
  }
  State on_device;
  std::vector<Mirror> parts;
};

UpdateResult update_on_device(const AdamWParams& params, const std::uint16_t* gradient, const State& from,
                              const State& to, std::size_t n) {
  StateMirror source(from, n);
  std::optional<StateMirror> target;
  if (to.hi != from.hi) target.emplace(to, n);
  DeviceArray gradients(2 * n), report(sizeof(DeviceReport));
  gradients.set(gradient, 2 * n);
  adamw_update_on_device(params, gradients.as<std::uint16_t>(), source.on_device,
                         target ? target->on_device : source.on_device, n, report.as<DeviceReport>(), {});
  DeviceReport result;
  report.get(&result, sizeof(result));
  (target ? *target : source).bring_back();
  return {n - result.skipped, result.skipped};
}

UpdateResult update_on_cpu(const AdamWParams& params, const std::uint16_t* gradient, const State& from, const State& to,
                           std::size_t n) {
  return adamw_update(params, gradient, from, to, n);
}

class OnGpu : public testing::TestWithParam<Variant> {
 protected:
  void SetUp() override {
    if (!gpu_is_here()) GTEST_SKIP() << "no CUDA device here";
  }
};

TEST_P(OnGpu, SameBitsAsOnTheCpu) {
  for (const std::size_t n : {37 * kBlock + 19, std::size_t{5}, 3 * kNormSegment + 777})
    expect_same_bits(GetParam(), n, update_on_cpu, update_on_device);
}

TEST_P(OnGpu, AllOrNoneOfACall) {
  expect_same_bits(GetParam(), 37 * kBlock + 19, update_on_cpu, update_on_device, /*skip_call_if_not_finite=*/true);
}

INSTANTIATE_TEST_SUITE_P(All, OnGpu, testing::ValuesIn(variants()), variant_name);

// More warps than a grid of the stand-in has.
TEST(LongUpdateOnGpu, SameBitsAsOnTheCpu) {
  if (!gpu_is_here()) GTEST_SKIP() << "no CUDA device here";
  const Variant variant{Rule::adamw, MomentFormat::block8, MomentFormat::block8, MasterFormat::split};
  expect_same_bits(variant, 274 * kBlock + 19, update_on_cpu, update_on_device);
}

TEST(SumsOnGpu, SameBitsAsOnTheCpu) {
  if (!gpu_is_here()) GTEST_SKIP() << "no CUDA device here";
  for (const std::size_t n : {3 * kNormSegment + 777, kNormSegment, std::size_t{1}, std::size_t{300}}) {
    auto g = gradients(n, 5, 7.0F);
    const std::size_t segments = (n + kNormSegment - 1) / kNormSegment;
    for (const bool finite : {true, false}) {
      if (!finite) g[n / 2] = 0xff80;
      std::vector<double> expected(segments), got(segments);
      EXPECT_EQ(gradient_norm_squared(g.data(), n, expected.data()), finite);
      DeviceArray on_device(2 * n), sums(8 * segments), flag(4);
      std::uint32_t not_finite = 0;
      on_device.set(g.data(), 2 * n);
      flag.set(&not_finite, 4);
      gradient_norm_squared_on_device(on_device.as<std::uint16_t>(), n, sums.as<double>(), flag.as<std::uint32_t>(),
                                      {});
      sums.get(got.data(), 8 * segments);
      flag.get(&not_finite, 4);
      EXPECT_EQ(not_finite == 0, finite);
      if (finite) {
        EXPECT_EQ(got, expected);
      }
    }
  }
}

TEST(MastersOnGpu, SplitAndJoinEveryExponent) {
  if (!gpu_is_here()) GTEST_SKIP() << "no CUDA device here";
  std::vector<float> values;
  std::mt19937 random(4);
  for (int i = 0; i < 100003; ++i) values.push_back(float_of(static_cast<std::uint32_t>(random())));
  const std::size_t n = values.size();
  DeviceArray master(4 * n), hi(2 * n), lo(2 * n), joined_again(4 * n);
  master.set(values.data(), 4 * n);
  split_master_on_device(master.as<float>(), hi.as<std::uint16_t>(), lo.as<std::uint16_t>(), n, {});
  join_master_on_device(hi.as<std::uint16_t>(), lo.as<std::uint16_t>(), joined_again.as<float>(), n, {});
  std::vector<float> back(n);
  std::vector<std::uint16_t> got(n), expected(n), low(n);
  joined_again.get(back.data(), 4 * n);
  hi.get(got.data(), 2 * n);
  split_master(values.data(), expected.data(), low.data(), n);
  EXPECT_EQ(got, expected);
  EXPECT_EQ(std::memcmp(back.data(), values.data(), 4 * n), 0);
}

}  // namespace
}  // namespace tierflow::optim

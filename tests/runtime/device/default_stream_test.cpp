// Work on another stream than the session's is refused. A device type that nobody has stands in for the card.
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gtest/gtest.h>

#include "runtime/base/exception.h"
#include "runtime/device/device_memory.h"

namespace tierflow {
namespace {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
c10::StreamId g_current = 0;

struct StandIn final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override { return device; }
  c10::Device getDevice() const override { return {kType, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, g_current);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, StandIn)

TEST(DefaultStream, AnotherOneIsRefused) {
  g_current = 0;
  EXPECT_NO_THROW(expect_default_stream({kType, 0}));
  g_current = 7;
  try {
    expect_default_stream({kType, 0});
    FAIL();
  } catch (const Exception& error) {
    EXPECT_EQ(error.error().kind, io::ErrorKind::usage);
  }
  g_current = 0;
}

}  // namespace
}  // namespace tierflow

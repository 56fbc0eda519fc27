#include "runtime/device/gpu_monitor.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

namespace tierflow {
namespace {

constexpr const char* kBus = "0000:65:00.0";

TEST(GpuMonitor, TellsWhatTheCardTells) {
  void* library = dlopen(TIERFLOW_FAKE_NVML, RTLD_NOW);
  ASSERT_NE(library, nullptr) << dlerror();
  const auto running = reinterpret_cast<int (*)()>(dlsym(library, "fake_nvml_running"));
  {
    const auto monitor = GpuMonitor::open(kBus, TIERFLOW_FAKE_NVML);
    ASSERT_NE(monitor, nullptr);
    EXPECT_EQ(running(), 1);
    const GpuSample first = monitor->sample(), second = monitor->sample();
    EXPECT_EQ(first.utilisation, 0.87);
    EXPECT_EQ(first.power, 123.4);
    EXPECT_EQ(*second.energy - *first.energy, 6.0);
    EXPECT_EQ(monitor->link(), "PCIe 4.0 x8 now, PCIe 4.0 x16 at most");
    EXPECT_EQ(monitor->bytes_used(), 100U);
    EXPECT_EQ(monitor->bytes_free(), 900U);
  }
  EXPECT_EQ(running(), 0);
  dlclose(library);
}

TEST(GpuMonitor, WhatTheCardDoesNotTellIsEmpty) {
  const auto monitor = GpuMonitor::open(kBus, TIERFLOW_FAKE_NVML_OLD);
  ASSERT_NE(monitor, nullptr);
  EXPECT_FALSE(monitor->sample().utilisation);
  EXPECT_FALSE(monitor->sample().energy);
  EXPECT_TRUE(monitor->sample().power);
}

TEST(GpuMonitor, WithoutNvmlOrTheCardThereIsNone) {
  EXPECT_EQ(GpuMonitor::open(kBus, "libno-such-library.so.1"), nullptr);
  EXPECT_EQ(GpuMonitor::open(kBus, "libm.so.6"), nullptr);  // a library without the functions
  EXPECT_EQ(GpuMonitor::open("0000:01:00.0", TIERFLOW_FAKE_NVML), nullptr);
}

}  // namespace
}  // namespace tierflow

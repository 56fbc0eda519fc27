#pragma once
// A CPU device whose calls a test may stand in front of.
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "swap/device.h"

namespace tierflow::testing {

class ForwardingDevice : public swap::Device {
 public:
  explicit ForwardingDevice(std::unique_ptr<swap::Device> device = swap::open_cpu_device())
      : device_(std::move(device)) {}

  using StreamId = swap::StreamId;
  using Event = swap::Event;

  std::string name() const override { return device_->name(); }
  io::Result<io::Buffer> allocate(std::size_t bytes) override { return device_->allocate(bytes); }
  std::string pin(std::span<const std::span<std::byte>> pieces) override { return device_->pin(pieces); }
  void unpin(std::span<std::byte> memory) noexcept override { device_->unpin(memory); }
  void copy_to_device(StreamId stream, std::byte* to, const std::byte* from, std::size_t bytes) override {
    device_->copy_to_device(stream, to, from, bytes);
  }
  void copy_to_host(StreamId stream, std::byte* to, const std::byte* from, std::size_t bytes) override {
    device_->copy_to_host(stream, to, from, bytes);
  }
  void gradient_to_host(StreamId stream, std::uint16_t* to, const float* from, std::size_t elements) override {
    device_->gradient_to_host(stream, to, from, elements);
  }
  void round_gradient(StreamId stream, std::uint16_t* to, const float* from, std::size_t elements) override {
    device_->round_gradient(stream, to, from, elements);
  }
  void enqueue(StreamId stream, std::function<void(const swap::DeviceQueue&)> work) override {
    device_->enqueue(stream, std::move(work));
  }
  Event record(StreamId stream) override { return device_->record(stream); }
  Event record_timed(StreamId stream) override { return device_->record_timed(stream); }
  std::optional<double> seconds_between(const Event& from, const Event& to) override {
    return device_->seconds_between(from, to);
  }
  void wait(StreamId stream, const Event& event) override { device_->wait(stream, event); }
  io::Error synchronize(const Event& event) override { return device_->synchronize(event); }

 private:
  std::unique_ptr<swap::Device> device_;
};

}  // namespace tierflow::testing

// The CPU device: "device memory" is host memory, each stream a thread with a queue, events a time behind a condition
// variable.
#include <bit>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <random>
#include <thread>

#include "swap/device.h"

namespace tierflow::swap {
namespace {

struct CpuEvent {
  std::mutex mutex;
  std::condition_variable happened;
  std::optional<std::chrono::steady_clock::time_point> at;

  void set() {
    std::lock_guard lock(mutex);
    at = std::chrono::steady_clock::now();
    happened.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex);
    happened.wait(lock, [this] { return at.has_value(); });
  }
  auto time() {
    std::lock_guard lock(mutex);
    return at;
  }
};

CpuEvent* state_of(const Event& event) {
  return static_cast<CpuEvent*>(event.state());
}

// Runs closures in order on a thread of its own.
class CpuStream {
 public:
  explicit CpuStream(std::uint64_t chaos_seed)
      : chaos_(chaos_seed != 0), random_(chaos_seed), thread_([this] { run(); }) {}
  ~CpuStream() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    work_.notify_one();
    thread_.join();
  }
  void enqueue(std::function<void()> task) {
    {
      std::lock_guard lock(mutex_);
      queue_.push_back(std::move(task));
    }
    work_.notify_one();
  }

 private:
  void run() {
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock lock(mutex_);
        work_.wait(lock, [this] { return stop_ || !queue_.empty(); });
        if (queue_.empty()) return;
        task = std::move(queue_.front());
        queue_.pop_front();
      }
      if (chaos_) std::this_thread::sleep_for(std::chrono::microseconds(random_() % 400));
      task();
    }
  }

  const bool chaos_;
  std::minstd_rand random_;
  std::mutex mutex_;
  std::condition_variable work_;
  std::deque<std::function<void()>> queue_;
  bool stop_ = false;
  std::thread thread_;
};

class CpuDevice final : public Device {
 public:
  explicit CpuDevice(const CpuDeviceOptions& options)
      : chaos_(options.chaos_seed != 0),
        upload_(options.chaos_seed),
        download_(options.chaos_seed == 0 ? 0 : options.chaos_seed * 31 + 7),
        update_(options.chaos_seed == 0 ? 0 : options.chaos_seed * 37 + 11),
        round_(options.chaos_seed == 0 ? 0 : options.chaos_seed * 43 + 17) {
    if (options.async_compute) compute_.emplace(options.chaos_seed == 0 ? 0 : options.chaos_seed * 41 + 13);
  }

  std::string name() const override { return "cpu"; }
  io::Result<io::Buffer> allocate(std::size_t bytes) override {
    io::Buffer buffer = io::allocate_buffer(bytes);
    if (!buffer && bytes != 0)
      return io::Error{.kind = io::ErrorKind::memory,
                       .operation = "allocate device memory",
                       .length = bytes,
                       .detail = "the system refused"};
    if (chaos_ && bytes != 0) std::memset(buffer.data(), 0xff, bytes);
    return buffer;
  }
  std::string pin(std::span<const std::span<std::byte>>) override { return {}; }
  void unpin(std::span<std::byte>) noexcept override {}

  void copy_to_device(StreamId stream, std::byte* to, const std::byte* from, std::size_t bytes) override {
    copy(stream, to, from, bytes);
  }
  void copy_to_host(StreamId stream, std::byte* to, const std::byte* from, std::size_t bytes) override {
    copy(stream, to, from, bytes);
  }
  void gradient_to_host(StreamId stream, std::uint16_t* to, const float* from, std::size_t elements) override {
    run(stream, [to, from, elements] {
      for (std::size_t i = 0; i < elements; ++i) to[i] = gradient_to_bf16(from[i]);
    });
  }

  void round_gradient(StreamId stream, std::uint16_t* to, const float* from, std::size_t elements) override {
    gradient_to_host(stream, to, from, elements);
  }
  void enqueue(StreamId stream, std::function<void(const DeviceQueue&)> work) override {
    run(stream, [work = std::move(work)] { work({}); });
  }

  Event record(StreamId stream) override {
    auto event = std::make_shared<CpuEvent>();
    run(stream, [event] { event->set(); });
    return Event(event);
  }
  Event record_timed(StreamId stream) override { return record(stream); }
  std::optional<double> seconds_between(const Event& from, const Event& to) override {
    if (!from || !to) return std::nullopt;
    const auto begin = state_of(from)->time(), end = state_of(to)->time();
    if (!begin || !end) return std::nullopt;
    return std::chrono::duration<double>(*end - *begin).count();
  }
  void wait(StreamId stream, const Event& event) override {
    if (!event) return;
    run(stream, [event] { state_of(event)->wait(); });
  }
  io::Error synchronize(const Event& event) override {
    if (event) state_of(event)->wait();
    return {};
  }

 private:
  void copy(StreamId stream, std::byte* to, const std::byte* from, std::size_t bytes) {
    if (chaos_) {
      // Poison in the first task, copy in the second: the stream's random delay falls between the two.
      run(stream, [to, bytes] { std::memset(to, 0xff, bytes); });
    }
    run(stream, [to, from, bytes] { std::memcpy(to, from, bytes); });
  }
  void run(StreamId stream, std::function<void()> task) {
    switch (stream) {
      case StreamId::upload:
        return upload_.enqueue(std::move(task));
      case StreamId::download:
        return download_.enqueue(std::move(task));
      case StreamId::update:
        return update_.enqueue(std::move(task));
      case StreamId::round:
        return round_.enqueue(std::move(task));
      default:
        return compute_ ? compute_->enqueue(std::move(task)) : task();
    }
  }

  const bool chaos_;
  CpuStream upload_, download_, update_, round_;
  std::optional<CpuStream> compute_;  // without it the calling thread is that stream
};

}  // namespace

std::unique_ptr<Device> open_cpu_device(const CpuDeviceOptions& options) {
  return std::make_unique<CpuDevice>(options);
}

}  // namespace tierflow::swap

// The CPU device: "device memory" is host memory, each copy stream a thread with a queue, events a flag behind a
// condition variable.
#include <bit>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <thread>

#include "swap/device.h"

namespace tierflow::swap {
namespace {

struct CpuEvent {
  std::mutex mutex;
  std::condition_variable happened;
  bool done = false;

  void set() {
    std::lock_guard lock(mutex);
    done = true;
    happened.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex);
    happened.wait(lock, [this] { return done; });
  }
};

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
        update_(options.chaos_seed == 0 ? 0 : options.chaos_seed * 37 + 11) {}

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
  void wait(StreamId stream, const Event& event) override {
    if (!event) return;
    run(stream, [event] { static_cast<CpuEvent*>(event.state())->wait(); });
  }
  io::Error synchronize(const Event& event) override {
    if (event) static_cast<CpuEvent*>(event.state())->wait();
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
  // The compute stream is the calling thread.
  void run(StreamId stream, std::function<void()> task) {
    if (stream == StreamId::compute) return task();
    (stream == StreamId::upload     ? upload_
     : stream == StreamId::download ? download_
                                    : update_)
        .enqueue(std::move(task));
  }

  const bool chaos_;
  CpuStream upload_, download_, update_;
};

}  // namespace

std::unique_ptr<Device> open_cpu_device(const CpuDeviceOptions& options) {
  return std::make_unique<CpuDevice>(options);
}

}  // namespace tierflow::swap

#pragma once
// The streams of the stand-in: a thread with a queue each.
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

namespace tierflow::testing::cuda {

using Clock = std::chrono::steady_clock;

// The end of a piece of work.
class Marker {
 public:
  void set() {
    std::lock_guard lock(mutex_);
    time_ = Clock::now();
    done_ = true;
    happened_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    happened_.wait(lock, [this] { return done_; });
  }
  bool done() {
    std::lock_guard lock(mutex_);
    return done_;
  }
  Clock::time_point time() {
    std::lock_guard lock(mutex_);
    return time_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable happened_;
  bool done_ = false;
  Clock::time_point time_;
};
using MarkerPtr = std::shared_ptr<Marker>;

class Stream {
 public:
  explicit Stream(std::uint64_t seed) : late_(seed != 0), random_(seed), thread_([this] { run(); }) {}
  ~Stream() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_one();
    thread_.join();
  }

  // `work` runs after all that is in the queue and after each of `after`.
  MarkerPtr enqueue(std::vector<MarkerPtr> after, std::function<void()> work) {
    auto done = std::make_shared<Marker>();
    std::lock_guard lock(mutex_);
    queue_.push_back({std::move(after), std::move(work), done});
    last_ = done;
    wake_.notify_one();
    return done;
  }
  // The end of what is in the queue; null where nothing ever was.
  MarkerPtr last() {
    std::lock_guard lock(mutex_);
    return last_;
  }
  // For the work itself: a time that nobody may rely on.
  void dawdle() {
    if (late_) std::this_thread::sleep_for(std::chrono::microseconds(random_() % 300));
  }
  bool late() const { return late_; }

 private:
  struct Work {
    std::vector<MarkerPtr> after;
    std::function<void()> run;
    MarkerPtr done;
  };

  void run() {
    for (;;) {
      Work work;
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [this] { return stop_ || !queue_.empty(); });
        if (queue_.empty()) return;
        work = std::move(queue_.front());
        queue_.pop_front();
      }
      for (const MarkerPtr& marker : work.after) marker->wait();
      if (work.run) {
        dawdle();
        work.run();
      }
      work.run = {};
      work.done->set();
    }
  }

  const bool late_;
  std::minstd_rand random_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Work> queue_;
  MarkerPtr last_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace tierflow::testing::cuda

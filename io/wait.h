#pragma once
// Waiting for one request.
#include <condition_variable>
#include <mutex>
#include <utility>

#include "io/volume.h"

namespace tierflow::io {

// Calls submit(Callback) and returns what the callback is given, on whichever thread that is.
template <class Submit>
Completion wait_for(Submit submit) {
  std::mutex mutex;
  std::condition_variable arrived;
  bool done = false;
  Completion result;
  submit([&](Completion&& completion) {
    std::lock_guard lock(mutex);
    result = std::move(completion);
    done = true;
    arrived.notify_one();
  });
  std::unique_lock lock(mutex);
  arrived.wait(lock, [&] { return done; });
  return result;
}

}  // namespace tierflow::io

#include "io/fork_guard.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <mutex>
#include <set>

namespace tierflow::io {
namespace {

struct Kept {
  std::mutex mutex;
  std::set<int> descriptors;
};

// Never destroyed: a fork may come while the process ends.
Kept& kept() {
  static Kept* const all = new Kept;
  return *all;
}

void before_fork() {
  kept().mutex.lock();
}

void in_parent() {
  kept().mutex.unlock();
}

void in_child() {
  const int null = open("/dev/null", O_RDWR | O_CLOEXEC);
  for (const int descriptor : kept().descriptors)
    if (null < 0 || dup3(null, descriptor, O_CLOEXEC) < 0) close(descriptor);
  if (null >= 0) close(null);
  kept().descriptors.clear();
  kept().mutex.unlock();
}

}  // namespace

void keep_from_children(int descriptor) {
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(before_fork, in_parent, in_child); });
  const std::lock_guard lock(kept().mutex);
  kept().descriptors.insert(descriptor);
}

void no_longer_kept(int descriptor) {
  const std::lock_guard lock(kept().mutex);
  kept().descriptors.erase(descriptor);
}

}  // namespace tierflow::io

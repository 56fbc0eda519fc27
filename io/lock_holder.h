#pragma once
// Finds out who holds a lock that this process did not get.
#include <sys/types.h>

namespace tierflow::io {

struct LockHolder {
  pid_t process = 0;    // 0: the kernel does not say
  bool shared = false;  // it only reads, and others may read too
  // It has ended, but its last requests are still at the drive, or another process inherited the file.
  bool ended = false;
};

// The holder of a flock on the file or folder behind `descriptor`.
LockHolder lock_holder(int descriptor);

}  // namespace tierflow::io

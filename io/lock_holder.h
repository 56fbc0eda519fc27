#pragma once
// Who holds a lock that this process did not get.
#include <sys/types.h>

namespace tierflow::io {

struct LockHolder {
  pid_t process = 0;    // 0: the kernel does not say
  bool shared = false;  // it reads, beside others
  bool ended = false;   // it lives no more; its last requests are still at the drive, or somebody inherited the file
};

// Of a flock on the file or folder behind `descriptor`.
LockHolder lock_holder(int descriptor);

}  // namespace tierflow::io

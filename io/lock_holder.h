#pragma once
// Who holds a lock that this process did not get.
#include <sys/types.h>

namespace tierflow::io {

// The process that holds a flock on the file or folder behind `descriptor`; 0 where the kernel does not say.
pid_t lock_holder(int descriptor);

}  // namespace tierflow::io

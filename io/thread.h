#pragma once
// Threads of io. They receive no signal of the process, and writing past RLIMIT_FSIZE gives EFBIG there, not SIGXFSZ.
#include <functional>
#include <thread>

#include "io/error.h"

namespace tierflow::io {

// An error of kind environment if the system gives no more threads; `thread` is then untouched.
Error start_thread(std::thread& thread, const char* name, std::function<void()> body);

}  // namespace tierflow::io

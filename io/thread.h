#pragma once
// Threads of io: they receive no signal of the process, and writing past RLIMIT_FSIZE there is EFBIG and not SIGXFSZ.
#include <functional>
#include <thread>

#include "io/error.h"

namespace tierflow::io {

// An error of kind environment where the system gives no more threads; `thread` is then untouched.
Error start_thread(std::thread& thread, const char* name, std::function<void()> body);

}  // namespace tierflow::io

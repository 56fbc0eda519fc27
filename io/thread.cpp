#include "io/thread.h"

#include <pthread.h>
#include <signal.h>

#include <system_error>

namespace tierflow::io {

Error start_thread(std::thread& thread, const char* name, std::function<void()> body) {
  sigset_t all, old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);  // a thread inherits the mask of the one that makes it
  Error error;
  try {
    thread = std::thread([name, body = std::move(body)] {
      pthread_setname_np(pthread_self(), name);
      body();
    });
  } catch (const std::system_error& failure) {
    error = Error{.kind = ErrorKind::environment,
                  .operation = "create thread",
                  .error_number = failure.code().value(),
                  .detail = "the limit on threads (ulimit -u, pids of the cgroup) is reached"};
  }
  pthread_sigmask(SIG_SETMASK, &old, nullptr);
  return error;
}

}  // namespace tierflow::io

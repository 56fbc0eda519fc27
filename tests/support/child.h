#pragma once
// Runs a function in a child process of its own, for limits and filters that cannot be taken back.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <functional>

namespace tierflow::testing {

// The child's exit code, which is what `body` returned; 128 + n where signal n ended it. Call it while the process has
// one thread.
inline int in_child(const std::function<int()>& body) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    const int code = body();
    std::fflush(nullptr);
    _exit(code);
  }
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child) return 127;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace tierflow::testing

#pragma once
// How a user ends a command in order: Ctrl-C, `kill`, a terminal that is closed.
#include "runtime/base/exception.h"

namespace tierflow {

// From now on SIGINT, SIGTERM and SIGHUP are counted: the command looks at stop_signal() where it can end in order. A
// second SIGINT or SIGTERM ends the process at once; a second SIGHUP does not, for a terminal that is closed may send
// two. A SIGHUP that was ignored (nohup) stays ignored. What is written to a pipe that nobody reads, or past a limit of
// the file's size, fails as a write and ends nothing.
void watch_signals();

// The number of the first signal that was counted; 0 where none was.
int stop_signal();

// The command ended because a signal asked for it, nothing half-written left. The exit code is 128 + signal.
class Stopped : public Exception {
 public:
  Stopped(int signal, const std::string& detail);
  int signal() const { return signal_; }

 private:
  int signal_;
};

// Throws Stopped where a signal was counted.
void throw_if_stopped();

}  // namespace tierflow

#pragma once
// Lets a user stop a command so that it ends cleanly: with Ctrl-C, `kill`, or by closing the terminal.
#include "runtime/base/exception.h"

namespace tierflow {

// From now on SIGINT, SIGTERM and SIGHUP are counted: the command checks stop_signal() where it can end cleanly. A
// SIGINT or SIGTERM that comes a second after the first signal or later ends the process at once; what comes earlier is
// the same request sent twice, as timeout(1) does. A second SIGHUP never ends it.
// A SIGHUP that was ignored (nohup) stays ignored. Writing to a pipe that nobody reads, or beyond a limit of the file's
// size, fails as a write and does not end the process.
void watch_signals();

// The number of the first signal that was counted; 0 if none was.
int stop_signal();

// The command ended because a signal asked for it. Nothing half-written is left. The exit code is 128 + signal.
class Stopped : public Exception {
 public:
  Stopped(int signal, const std::string& detail);
  int signal() const { return signal_; }

 private:
  int signal_;
};

// Throws Stopped if a signal was counted. what_is_left: the end of the line that the user reads.
void throw_if_stopped(const char* what_is_left = "nothing was kept");

}  // namespace tierflow

#include "runtime/base/signals.h"

#include <csignal>

namespace tierflow {
namespace {

volatile std::sig_atomic_t first_signal = 0;

void on_signal(int number) {
  if (first_signal != 0 && number != SIGHUP) {
    std::signal(number, SIG_DFL);
    std::raise(number);
  }
  if (first_signal == 0) first_signal = number;
}

}  // namespace

void watch_signals() {
  first_signal = 0;
  std::signal(SIGINT, on_signal);
  std::signal(SIGTERM, on_signal);
  if (std::signal(SIGHUP, on_signal) == SIG_IGN) std::signal(SIGHUP, SIG_IGN);
  std::signal(SIGPIPE, SIG_IGN);  // a write then fails with EPIPE
  std::signal(SIGXFSZ, SIG_IGN);  // with EFBIG
}

int stop_signal() {
  return first_signal;
}

Stopped::Stopped(int signal, const std::string& detail)
    : Exception(io::ErrorKind::cancelled, detail), signal_(signal) {}

void throw_if_stopped(const char* what_is_left) {
  if (const int signal = stop_signal(); signal != 0)
    throw Stopped(signal, std::string("stopped by ") +
                              (signal == SIGINT    ? "SIGINT (Ctrl-C)"
                               : signal == SIGTERM ? "SIGTERM"
                                                   : "SIGHUP (its terminal was closed)") +
                              "; " + what_is_left);
}

}  // namespace tierflow

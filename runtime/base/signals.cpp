#include "runtime/base/signals.h"

#include <time.h>

#include <atomic>
#include <csignal>
#include <cstdint>

namespace tierflow {
namespace {

volatile std::sig_atomic_t first_signal = 0;
std::atomic<std::int64_t> first_at = 0;  // milliseconds
static_assert(std::atomic<std::int64_t>::is_always_lock_free, "a signal's handler may use no other");

// timeout(1) signals its child and then the child's group, and a wrapper forwards the Ctrl-C that the terminal has
// delivered already: that is one request.
constexpr std::int64_t kOneRequestMs = 1000;

std::int64_t now_ms() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * std::int64_t{1000} + now.tv_nsec / 1'000'000;
}

void on_signal(int number) {
  if (first_signal == 0) {
    first_at = now_ms();
    first_signal = number;
  } else if (number != SIGHUP && now_ms() - first_at >= kOneRequestMs) {
    std::signal(number, SIG_DFL);
    std::raise(number);
  }
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

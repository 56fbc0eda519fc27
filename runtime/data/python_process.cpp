#include "runtime/data/python_process.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>

#include "runtime/base/exception.h"
#include "runtime/base/signals.h"

extern char** environ;

namespace tierflow {

PythonProcess::PythonProcess(Job job)
    : job_(std::move(job)), python_(job_.python.empty() ? "python3" : job_.python.string()) {
  start();
}

PythonProcess::~PythonProcess() {
  stop();
}

void PythonProcess::stop() noexcept {
  if (process_ < 0) return;
  kill(process_, SIGKILL);
  while (waitpid(process_, nullptr, 0) < 0 && errno == EINTR) {
  }
  process_ = -1;
}

void PythonProcess::start() {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) fail_system("create a socket for", python_, errno);
  socket_ = File(ends[0]);
  const File theirs(ends[1]);
  errors_ = File(memfd_create("script-errors", MFD_CLOEXEC));
  if (!errors_) fail_system("create a file for", python_, errno);
  fcntl(socket_.fd(), F_SETFL, O_NONBLOCK);

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, theirs.fd(), STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, theirs.fd(), STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, errors_.fd(), STDERR_FILENO);
  // -I: neither the environment nor the current folder decides which modules are imported.
  std::vector<std::string> words = {python_, "-I", "-c", job_.script};
  words.insert(words.end(), job_.arguments.begin(), job_.arguments.end());
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  pid_t process = -1;
  const int error = posix_spawnp(&process, python_.c_str(), &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0)
    throw Exception(io::Error{
        .kind = io::ErrorKind::environment,
        .operation = "start",
        .path = python_,
        .error_number = error,
        .detail = fmt::format("the data need Python with the package `{}`; name it with --python", job_.package)});
  process_ = process;
}

void PythonProcess::wait_for(short events) {
  pollfd waiting{.fd = socket_.fd(), .events = events, .revents = 0};
  const int timeout = static_cast<int>(std::clamp(job_.patience * 1000, 1.0, 2e9));
  int ready = 0;
  while ((ready = poll(&waiting, 1, timeout)) < 0 && errno == EINTR) heed_stop();
  if (ready < 0) fail_system("wait for the tokenizer", job_.path, errno);
  if (ready == 0) {
    stop();
    fail_input(
        job_.path,
        fmt::format("kept the tokenizer silent for {:g} s and was stopped: it is damaged, or made to take forever",
                    job_.patience));
  }
}

void PythonProcess::send(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(socket_.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent >= 0) {
      bytes = bytes.subspan(static_cast<std::size_t>(sent));
    } else if (errno == EAGAIN) {
      wait_for(POLLOUT);
    } else if (errno != EINTR) {
      fail_ended();
    }
  }
}

void PythonProcess::receive(std::span<std::byte> out) {
  while (!out.empty()) {
    const ssize_t got = recv(socket_.fd(), out.data(), out.size(), 0);
    if (got > 0) {
      out = out.subspan(static_cast<std::size_t>(got));
    } else if (got < 0 && errno == EAGAIN) {
      wait_for(POLLIN);
    } else if (got == 0 || errno != EINTR) {
      fail_ended();
    }
  }
}

void PythonProcess::heed_stop() const {
  if (heeds_stops_) throw_if_stopped();
}

void PythonProcess::fail_ended() {
  heed_stop();  // Ctrl-C reaches the tokenizer too
  int status = 0;
  while (waitpid(process_, &status, 0) < 0 && errno == EINTR) {
  }
  process_ = -1;
  std::array<char, 4096> tail{};
  const off_t length = lseek(errors_.fd(), 0, SEEK_END);
  const off_t start = std::max<off_t>(0, length - static_cast<off_t>(tail.size()));
  const ssize_t got = pread(errors_.fd(), tail.data(), tail.size(), start);
  std::string_view text(tail.data(), static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
  while (!text.empty() && text.back() == '\n') text.remove_suffix(1);
  if (const auto line = text.rfind('\n'); line != std::string_view::npos) text.remove_prefix(line + 1);
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  if (code == 3) fail_input(job_.path, printable(text, 300));
  if (code == 4) fail(io::ErrorKind::environment, python_, printable(text, 300));
  const std::string how = WIFSIGNALED(status) ? fmt::format("was killed by signal {}{}", WTERMSIG(status),
                                                            WTERMSIG(status) == SIGKILL ? " (out of memory?)" : "")
                                              : fmt::format("ended with status {}", code);
  fail(io::ErrorKind::environment, job_.path,
       fmt::format("the tokenizer's Python ({}) {}: {}", python_, how, printable(text, 300)));
}

}  // namespace tierflow

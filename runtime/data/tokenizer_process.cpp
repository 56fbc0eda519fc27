#include "runtime/data/tokenizer_process.h"

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
#include <cstring>

#include "runtime/base/exception.h"
#include "runtime/base/signals.h"
#include "runtime/data/tokenizer_script.h"

extern char** environ;

namespace tierflow {
namespace {

struct Greeting {
  std::array<char, 4> magic;
  std::uint32_t vocab_size;
  std::int32_t end_of_text;
};

template <class T>
std::span<std::byte> bytes_of(T& value) {
  return std::as_writable_bytes(std::span(&value, 1));
}

void append(std::vector<std::byte>& request, std::uint32_t word) {
  const auto bytes = std::as_bytes(std::span(&word, 1));
  request.insert(request.end(), bytes.begin(), bytes.end());
}

}  // namespace

TokenizerProcess::TokenizerProcess(const DataOptions& options)
    : path_(options.tokenizer.string()),
      python_(options.python.empty() ? "python3" : options.python.string()),
      patience_(options.tokenizer_seconds) {
  open_regular(options.tokenizer);
  start(python_);
  try {
    Greeting greeting{};
    receive(bytes_of(greeting));
    if (greeting.magic != std::array{'T', 'F', 'T', 'K'})
      fail(io::ErrorKind::environment, python_, "is not a Python 3 interpreter");
    vocab_size_ = greeting.vocab_size;
    end_of_text_ = greeting.end_of_text;
  } catch (...) {
    stop();
    throw;
  }
}

TokenizerProcess::~TokenizerProcess() {
  stop();
}

void TokenizerProcess::stop() noexcept {
  if (process_ < 0) return;
  kill(process_, SIGKILL);
  while (waitpid(process_, nullptr, 0) < 0 && errno == EINTR) {
  }
  process_ = -1;
}

void TokenizerProcess::start(const std::string& python) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) fail_system("create a socket for", python, errno);
  socket_ = File(ends[0]);
  const File theirs(ends[1]);
  errors_ = File(memfd_create("tokenizer-errors", MFD_CLOEXEC));
  if (!errors_) fail_system("create a file for", python, errno);
  fcntl(socket_.fd(), F_SETFL, O_NONBLOCK);

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, theirs.fd(), STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, theirs.fd(), STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, errors_.fd(), STDERR_FILENO);
  // -I: neither the environment nor the current folder decides which modules are imported.
  std::array<std::string, 5> words = {python, "-I", "-c", tokenizer_script, path_};
  std::array<char*, 6> arguments{};
  std::transform(words.begin(), words.end(), arguments.begin(), [](std::string& word) { return word.data(); });
  pid_t process = -1;
  const int error = posix_spawnp(&process, python.c_str(), &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0)
    throw Exception(io::Error{
        .kind = io::ErrorKind::environment,
        .operation = "start",
        .path = python,
        .error_number = error,
        .detail = "a model with a tokenizer.json needs Python with the package `tokenizers`; name it with --python"});
  process_ = process;
}

void TokenizerProcess::wait_for(short events) {
  pollfd waiting{.fd = socket_.fd(), .events = events, .revents = 0};
  const int timeout = static_cast<int>(std::clamp(patience_ * 1000, 1.0, 2e9));
  int ready = 0;
  while ((ready = poll(&waiting, 1, timeout)) < 0 && errno == EINTR) throw_if_stopped();
  if (ready < 0) fail_system("wait for the tokenizer", path_, errno);
  if (ready == 0) {
    stop();
    fail_input(
        path_,
        fmt::format("kept the tokenizer silent for {:g} s and was stopped: it is damaged, or made to take forever",
                    patience_));
  }
}

void TokenizerProcess::send(std::span<const std::byte> bytes) {
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

void TokenizerProcess::receive(std::span<std::byte> out) {
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

void TokenizerProcess::fail_ended() {
  throw_if_stopped();  // Ctrl-C reaches the tokenizer too
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
  if (code == 3) fail_input(path_, printable(text, 300));
  if (code == 4) fail(io::ErrorKind::environment, python_, printable(text, 300));
  const std::string how = WIFSIGNALED(status) ? fmt::format("was killed by signal {}{}", WTERMSIG(status),
                                                            WTERMSIG(status) == SIGKILL ? " (out of memory?)" : "")
                                              : fmt::format("ended with status {}", code);
  fail(io::ErrorKind::environment, path_,
       fmt::format("the tokenizer's Python ({}) {}: {}", python_, how, printable(text, 300)));
}

std::vector<std::uint32_t> TokenizerProcess::encode(std::span<const TextPiece> pieces) {
  std::vector<std::byte> request;
  append(request, static_cast<std::uint32_t>(pieces.size()));
  for (const TextPiece& piece : pieces) {
    append(request, static_cast<std::uint32_t>(piece.text.size()) | (piece.ends_document ? 0x80000000u : 0u));
    const auto bytes = std::as_bytes(std::span(piece.text.data(), piece.text.size()));
    request.insert(request.end(), bytes.begin(), bytes.end());
  }
  send(request);
  std::uint32_t count = 0;
  receive(bytes_of(count));
  std::vector<std::uint32_t> ids(count);
  receive(std::as_writable_bytes(std::span(ids)));
  return ids;
}

}  // namespace tierflow

// Preloaded into a program (LD_PRELOAD), makes it a fork server: the program and the library that
// $TIERFLOW_FORK_SERVER_LOADS names (empty: none) are loaded once, and main() runs in a fork for each message that the
// socket with the number $TIERFLOW_FORK_SERVER gets. LibTorch takes 0.3 s to load, longer than most runs of tests.
//
// A message (SOCK_SEQPACKET) carries the three standard streams, and as strings that end with a zero: the working
// folder, the number of arguments, the arguments, the environment. The answers are the process's number, once it runs,
// and its status as waitpid() gives it, once it has ended; four bytes each. One process at a time. It ends with the
// other end of the socket. Code 125: it cannot serve, for the reason on standard error.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <iterator>
#include <vector>

namespace {

using Main = int (*)(int, char**, char**);
Main program_main;

[[noreturn]] void cannot_serve(const char* reason) {
  fprintf(stderr, "fork server: %s\n", reason);
  _exit(125);
}

// A fork has the thread that asked for it alone.
bool has_threads() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/task"), {}) != 1;
}

struct Request {
  std::vector<char> text = std::vector<char>(std::size_t{1} << 18);
  int streams[3] = {-1, -1, -1};
};

// False at the end of the socket.
bool receive(int socket, Request& request) {
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof request.streams)] = {};
  iovec text{request.text.data(), request.text.size()};
  msghdr message{};
  message.msg_iov = &text;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t count = 0;
  do count = recvmsg(socket, &message, 0);
  while (count < 0 && errno == EINTR);
  if (count <= 0) return false;
  const cmsghdr* rights = CMSG_FIRSTHDR(&message);
  if ((message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0 || rights == nullptr) cannot_serve("a message is not whole");
  memcpy(request.streams, CMSG_DATA(rights), sizeof request.streams);
  request.text.resize(static_cast<std::size_t>(count));
  return true;
}

// Where the fork becomes the program: what it was given stays until it ends.
[[noreturn]] void run(Request& request) {
  std::vector<char*> words;
  for (char* at = request.text.data(); at < request.text.data() + request.text.size(); at += strlen(at) + 1)
    words.push_back(at);
  const int count = atoi(words.at(1));
  std::vector<char*> arguments(words.begin() + 2, words.begin() + 2 + count);
  std::vector<char*> variables(words.begin() + 2 + count, words.end());
  arguments.push_back(nullptr);
  variables.push_back(nullptr);
  environ = variables.data();
  for (int i = 0; i < 3; ++i) dup2(request.streams[i], i);
  for (const int stream : request.streams)
    if (stream > 2) close(stream);
  if (chdir(words.at(0)) != 0) cannot_serve("the working folder is gone");
  const int code = program_main(count, arguments.data(), environ);
  fflush(nullptr);
  _exit(code);  // LibTorch's registries, taken down one by one, would take 0.1 s
}

int serve(int, char**, char**) {
  const int socket = atoi(getenv("TIERFLOW_FORK_SERVER"));
  const char* library = getenv("TIERFLOW_FORK_SERVER_LOADS");
  if (library != nullptr && *library != '\0' && dlopen(library, RTLD_NOW | RTLD_GLOBAL) == nullptr)
    cannot_serve(dlerror());
  if (has_threads()) cannot_serve("what is loaded began threads, which a fork would not have");
  for (;;) {
    Request request;
    if (!receive(socket, request)) _exit(0);
    const pid_t child = fork();
    if (child < 0) cannot_serve(strerror(errno));
    if (child == 0) {
      close(socket);
      run(request);
    }
    for (const int stream : request.streams) close(stream);
    int status = 0;
    send(socket, &child, sizeof child, MSG_NOSIGNAL);
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    send(socket, &status, sizeof status, MSG_NOSIGNAL);
  }
}

}  // namespace

// The C library's own begins main() with it, after all libraries that the program is linked with are there.
extern "C" int __libc_start_main(Main main, int count, char** arguments, void (*init)(), void (*fini)(),
                                 void (*loader_fini)(), void* stack_end) {
  program_main = main;
  const auto next = reinterpret_cast<decltype(&__libc_start_main)>(dlsym(RTLD_NEXT, "__libc_start_main"));
  return next(serve, count, arguments, init, fini, loader_fini, stack_end);
}

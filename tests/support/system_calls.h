#pragma once
// Stands between the project's code and the kernel in a test program that is linked with --wrap for these calls
// (tests/CMakeLists.txt lists them): records what is asked of the kernel, and answers in its place what a test wants
// to go wrong.
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tierflow::testing {

struct SystemCall {
  std::string_view name;  // "fsync"
  std::string path;       // of the file, also where the call has a descriptor; empty for rings
  long argument = 0;      // bytes, mode, lock operation, flags, request, or where a range begins
};

// Nothing lets the call through. Less than 0 is -errno. Else:
//   pread, pwrite           only so many bytes are moved, really
//   io_submit               only so many requests are submitted, really
//   fstatfs                 the type of the file system
//   statx                   the alignment of direct I/O
//   all others              what they return, without having been made
using Answer = std::function<std::optional<long>(const SystemCall&)>;

// While it lives, calls are recorded and answered. One at a time; calls come from any thread.
class SystemCalls {
 public:
  explicit SystemCalls(Answer answer = {});
  ~SystemCalls();
  SystemCalls(const SystemCalls&) = delete;
  SystemCalls& operator=(const SystemCalls&) = delete;

  std::vector<SystemCall> seen() const;
  std::size_t count(std::string_view name) const;
};

// Fails the calls of this name for paths that contain `part`; all of them, or the first `times`.
Answer failing(std::string name, int error_number, std::string part = {}, int times = -1);

}  // namespace tierflow::testing

#pragma once
// The interface between io and the kernel. A Backend carries single operations to the kernel and brings back raw
// results. The Engine handles short transfers, retries and errors for every backend.
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "io/error.h"
#include "io/volume.h"

namespace tierflow::io {

enum class Action : std::uint8_t { read, write, flush };

struct KernelOp {
  Action action = Action::read;
  bool patient = false;      // the kernel asked to try again: use a path that may block, on another thread
  std::uint32_t file = 0;    // index into the registered files
  std::uint32_t ticket = 0;  // comes back in the result
  std::uint64_t offset = 0;
  std::byte* data = nullptr;
  std::size_t length = 0;
};

struct KernelResult {
  std::uint32_t ticket = 0;
  std::int64_t value = 0;  // bytes moved, or -errno
};

// One thread makes every call but wake(). Each operation taken by push() gives exactly one result.
class Backend {
 public:
  virtual ~Backend() = default;  // requires that every result was reaped

  virtual EngineKind kind() const = 0;

  // Once, before the first push. If the kernel refuses the registration, the files still work, and registered_files()
  // is false.
  virtual Error register_files(std::span<const int> descriptors) = 0;
  virtual bool registered_files() const { return false; }

  // Replaces the registered regions. After an error none is registered; unregistered memory works too.
  virtual Error register_memory(std::span<const std::span<std::byte>> regions) = 0;

  // False if there is no room: reap first. An operation may reach the kernel as late as in the next reap().
  virtual bool push(const KernelOp& op) = 0;

  // Hands what was pushed to the kernel, waits until there is a result, a wake() or the timeout (0 does not wait,
  // negative waits without limit), and appends the results.
  virtual void reap(std::vector<KernelResult>& results, std::chrono::nanoseconds timeout) = 0;

  // Any thread. The next or present reap() returns soon.
  virtual void wake() = 0;
};

// Base of the backends that know their files by descriptor and cannot register memory.
class PlainBackend : public Backend {
 public:
  Error register_files(std::span<const int> descriptors) override {
    descriptors_.assign(descriptors.begin(), descriptors.end());
    return {};
  }
  Error register_memory(std::span<const std::span<std::byte>>) override {
    return Error{.kind = ErrorKind::environment, .operation = "register", .error_number = EOPNOTSUPP};
  }

 protected:
  std::vector<int> descriptors_;
};

// `depth`: the most operations that will be in flight. An error says why the kernel does not offer it.
Result<std::unique_ptr<Backend>> make_uring_backend(unsigned depth);
Result<std::unique_ptr<Backend>> make_libaio_backend(unsigned depth);
Result<std::unique_ptr<Backend>> make_threads_backend(unsigned depth);

}  // namespace tierflow::io

#pragma once
// FRONT DOOR of base, which every other folder of runtime uses: files, JSON, signals and the machine. No torch.
// runtime throws Exception for errors of the caller, a file or the machine. It carries the io::Error that says what
// failed, where, and what to do. A defect of Tierflow is a std::logic_error.
#include <stdexcept>
#include <string>
#include <utility>

#include "io/error.h"

namespace tierflow {

class Exception : public std::runtime_error {
 public:
  explicit Exception(io::Error error) : std::runtime_error(error.message()), error_(std::move(error)) {}
  Exception(io::ErrorKind kind, std::string detail) : Exception(io::Error{.kind = kind, .detail = std::move(detail)}) {}
  const io::Error& error() const { return error_; }

 private:
  io::Error error_;
};

// The value of a Result, or an Exception with its Error.
template <class T>
T value_or_throw(io::Result<T> result) {
  if (!result.ok()) throw Exception(result.error());
  return std::move(result).value();
}

// Throws Exception. where: the file or option that is wrong. detail: what is wrong with it, and what to do.
[[noreturn]] inline void fail(io::ErrorKind kind, std::string where, std::string detail) {
  throw Exception(io::Error{.kind = kind, .path = std::move(where), .detail = std::move(detail)});
}
[[noreturn]] inline void fail_input(std::string where, std::string detail) {
  fail(io::ErrorKind::input, std::move(where), std::move(detail));
}
// For options together, a command or a configuration: `detail` names what is wrong.
[[noreturn]] inline void fail_usage(std::string detail) {
  fail(io::ErrorKind::usage, {}, std::move(detail));
}
// The system call `operation` on `path` failed with `error_number`; `detail` may say what to do.
[[noreturn]] void fail_system(std::string operation, std::string path, int error_number, std::string detail = {});

// Throws the error, with `more` at the end of what it says.
[[noreturn]] void fail_with_more(io::Error error, const std::string& more);

inline void throw_if(const io::Error& error) {
  if (error) throw Exception(error);
}

}  // namespace tierflow

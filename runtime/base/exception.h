#pragma once
// FRONT DOOR of base, on which every room stands: files, JSON, signals and the machine, without torch. The one
// exception of runtime's front doors. Carries the io::Error that names what failed, where, and what to do.
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

// Throws: `where` is the file or option that is wrong, `detail` what is wrong with it and what to do.
[[noreturn]] inline void fail(io::ErrorKind kind, std::string where, std::string detail) {
  throw Exception(io::Error{.kind = kind, .path = std::move(where), .detail = std::move(detail)});
}
[[noreturn]] inline void fail_input(std::string where, std::string detail) {
  fail(io::ErrorKind::input, std::move(where), std::move(detail));
}
// The system call `operation` on `path` failed with `error_number`; `detail` may say what to do.
[[noreturn]] void fail_system(std::string operation, std::string path, int error_number, std::string detail = {});

inline void throw_if(const io::Error& error) {
  if (error) throw Exception(error);
}

}  // namespace tierflow

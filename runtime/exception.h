#pragma once
// The one exception of runtime's front doors. Carries the io::Error that names what failed, where, and what to do.
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
inline void throw_if(const io::Error& error) {
  if (error) throw Exception(error);
}

}  // namespace tierflow

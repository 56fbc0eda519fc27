#pragma once
// The error value of io and swap: what failed, where, and with which errno. It is passed by value, between threads too.
#include <cstdint>
#include <string>
#include <utility>
#include <variant>

namespace tierflow::io {

// The kind decides the exit code of the program (docs/errors.md) and nothing else.
enum class ErrorKind : std::uint8_t {
  none = 0,
  internal = 1,     // a defect of ours: an exception that nobody expected
  usage = 2,        // the caller asked for something impossible
  input = 3,        // an input file is not what it claims to be
  environment = 4,  // the machine lacks something: space, a permission, a file system with O_DIRECT
  io = 5,           // a read, write or flush failed
  corruption = 6,   // bytes came back that were not the bytes written
  numeric = 7,      // non-finite values where the run cannot go on
  locked = 8,       // another process holds it
  memory = 9,       // an allocation or a budget was exceeded
  cancelled = 130,  // the user asked to stop
};

struct [[nodiscard]] Error {
  ErrorKind kind = ErrorKind::none;
  std::string operation;  // "read", "write", "open", "flush", ...
  std::string path;       // the file or folder; empty if there is none
  std::uint64_t offset = 0;
  std::uint64_t length = 0;  // bytes asked for; 0 if the operation has no length
  int error_number = 0;      // errno; 0 if no system call failed
  std::string detail;        // what to do about it, in one sentence

  explicit operator bool() const { return kind != ErrorKind::none; }
  // One line: operation, path, offset and length if they apply, strerror, detail.
  std::string message() const;
};

// What the user can do about an errno of a read, write or flush; empty if the errno says enough.
std::string advice(int error_number);

// A value or an Error. Reading the value of a failed Result is a programming error and terminates.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : content_(std::in_place_index<0>, std::move(value)) {}
  Result(Error error) : content_(std::in_place_index<1>, std::move(error)) {}

  bool ok() const { return content_.index() == 0; }
  explicit operator bool() const { return ok(); }
  T& value() & { return std::get<0>(content_); }
  T&& value() && { return std::get<0>(std::move(content_)); }
  const T& value() const& { return std::get<0>(content_); }
  T& operator*() & { return value(); }
  T* operator->() { return &value(); }
  const Error& error() const { return std::get<1>(content_); }

 private:
  std::variant<T, Error> content_;
};

}  // namespace tierflow::io

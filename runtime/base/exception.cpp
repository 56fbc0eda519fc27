#include "runtime/base/exception.h"

#include <cerrno>

namespace tierflow {
namespace {

io::ErrorKind kind_of(int error_number) {
  switch (error_number) {
    case ENOSPC:
    case EDQUOT:
    case EROFS:
    case EACCES:
    case EPERM:
    case EMFILE:
    case ENFILE:
    case EAGAIN:
      return io::ErrorKind::environment;
    case ENOMEM:
      return io::ErrorKind::memory;
    case ENOENT:
    case ENOTDIR:
    case EISDIR:
    case ELOOP:
    case ENAMETOOLONG:
    case EXDEV:
    case ENXIO:
      return io::ErrorKind::input;
    default:
      return io::ErrorKind::io;
  }
}

}  // namespace

void fail_system(std::string operation, std::string path, int error_number, std::string detail) {
  throw Exception(io::Error{.kind = kind_of(error_number),
                            .operation = std::move(operation),
                            .path = std::move(path),
                            .error_number = error_number,
                            .detail = std::move(detail)});
}

void fail_with_more(io::Error error, const std::string& more) {
  error.detail += (error.detail.empty() ? "" : "; ") + more;
  throw Exception(std::move(error));
}

}  // namespace tierflow

#include "io/error.h"

#include <cerrno>
#include <cstring>

namespace tierflow::io {

std::string Error::message() const {
  std::string text = operation;
  if (!path.empty()) text += (text.empty() ? "" : " ") + path;
  if (length != 0) text += " (offset " + std::to_string(offset) + ", " + std::to_string(length) + " bytes)";
  if (error_number != 0) {
    char reason[128];
    text += std::string(": ") + strerror_r(error_number, reason, sizeof reason) + " (errno " +
            std::to_string(error_number) + ")";
  }
  if (!detail.empty()) text += (text.empty() ? "" : ": ") + detail;
  return text;
}

std::string advice(int error_number) {
  switch (error_number) {
    case EIO:
    case ENODEV:
    case ENXIO:
      return "the drive failed or went away; the kernel's log (dmesg) says more; name a folder on another drive with "
             "--storage";
    case EROFS:
      return "the file system has become read-only, as it does after an error of its drive; the kernel's log (dmesg) "
             "says more; name a folder on another drive with --storage";
    case ENOSPC:
    case EDQUOT:
      return "the drive ran out of space that was reserved";
    case EFBIG:
      return "the file size limit (ulimit -f) is smaller than the file";
    default:
      return {};
  }
}

}  // namespace tierflow::io

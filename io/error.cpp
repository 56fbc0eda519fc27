#include "io/error.h"

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

}  // namespace tierflow::io

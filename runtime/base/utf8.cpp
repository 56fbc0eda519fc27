#include "runtime/base/utf8.h"

namespace tierflow {

std::size_t find_invalid_utf8(std::string_view text) {
  std::size_t at = 0;
  const auto byte = [&](std::size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
  while (at < text.size()) {
    const unsigned lead = byte(at);
    if (lead < 0x80) {
      ++at;
      continue;
    }
    const std::size_t length = lead >= 0xc2 && lead < 0xe0   ? 2
                               : lead >= 0xe0 && lead < 0xf0 ? 3
                               : lead >= 0xf0 && lead < 0xf5 ? 4
                                                             : 0;
    if (length == 0) return at;
    // Overlong forms, surrogates and what lies beyond U+10FFFF show in the second byte.
    const unsigned least = lead == 0xe0   ? 0xa0
                           : lead == 0xf0 ? 0x90
                                          : 0x80,
                   most = lead == 0xed   ? 0x9f
                          : lead == 0xf4 ? 0x8f
                                         : 0xbf;
    if (byte(at + 1) < least || byte(at + 1) > most) return at;
    for (std::size_t i = 2; i < length; ++i)
      if ((byte(at + i) & 0xc0) != 0x80) return at;
    at += length;
  }
  return std::string_view::npos;
}

}  // namespace tierflow

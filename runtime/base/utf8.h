#pragma once
// Which text is UTF-8, as RFC 3629 has it.
#include <cstddef>
#include <string_view>

namespace tierflow {

// Position of the first byte of `text` that is not part of valid UTF-8; npos if all of it is valid. A sequence that is
// cut by the end of `text` counts as invalid, from its first byte.
std::size_t find_invalid_utf8(std::string_view text);

}  // namespace tierflow

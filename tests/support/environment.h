#pragma once
// How much of a long test is wanted, or where it begins.
#include <cstdint>
#include <cstdlib>
#include <string>

namespace tierflow::testing {

// The number in an environment variable; `otherwise` where it is not set.
inline std::uint64_t number_in(const char* variable, std::uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : std::stoull(text);
}

}  // namespace tierflow::testing

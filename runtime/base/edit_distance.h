#pragma once
// How similar two names are.
#include <cstddef>
#include <string_view>

namespace tierflow {

// The least number of insertions, deletions, replacements and swaps of neighbours that turn one into the other.
std::size_t edit_distance(std::string_view a, std::string_view b);

}  // namespace tierflow

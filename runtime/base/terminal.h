#pragma once
// The width of a terminal, and breaking prose into lines.
#include <cstddef>
#include <string>
#include <string_view>

namespace tierflow {

// Columns of the terminal that the descriptor leads to; 80 if it leads to none.
std::size_t columns_of(int descriptor);

// `text` with a line break in place of blanks wherever a line would be longer than `columns`. Lines after the first are
// indented by `indent`; the first is as long as if it stood behind that indent. A word longer than a line stays whole.
std::string wrapped(std::string_view text, std::size_t columns, std::size_t indent = 0);

}  // namespace tierflow

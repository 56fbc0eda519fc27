#pragma once
// The heap as operator new gives it out, counted for the whole process that links counted_heap.cpp.
#include <cstdint>

namespace tierflow::testing {

std::int64_t heap_used();
// The most since reset_heap_peak().
std::int64_t heap_peak();
void reset_heap_peak();

}  // namespace tierflow::testing

#pragma once
// The summaries of the data, as text for people.
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/data/data.h"

namespace tierflow {

// One line for each dataset of rows, for each that is mixed with others, and for each of which records were passed
// over.
std::vector<std::string> data_lines(const std::vector<DataSummary>& data, std::int64_t sequence_length);

// All of it, in lines, with a histogram of the examples' lengths.
std::string data_table(const std::vector<DataSummary>& data, std::int64_t sequence_length);

}  // namespace tierflow

#pragma once
// The summaries of the data, as JSON.
#include <nlohmann/json_fwd.hpp>
#include <vector>

#include "runtime/data/data.h"

namespace tierflow {

// A list with an object for each dataset, as `tierflow data prepare --json` prints it.
nlohmann::ordered_json data_json(const std::vector<DataSummary>& data);

}  // namespace tierflow

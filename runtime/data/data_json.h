#pragma once
// What became of the data, as JSON.
#include <nlohmann/json_fwd.hpp>
#include <vector>

#include "runtime/data/data.h"

namespace tierflow {

// A list: for each dataset an object, what `tierflow data prepare --json` prints.
nlohmann::ordered_json data_json(const std::vector<DataSummary>& data);

}  // namespace tierflow

#pragma once
// The units of a model as JSON, for a store whose model no config.json describes: an array with each unit's name
// and tensors; of a tensor its name, shape, format, and whether it is trained and has its moments in fp32.
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "runtime/spec/model_spec.h"

namespace tierflow {

nlohmann::json unit_list(const std::vector<UnitSpec>& units);
// Reads such JSON, as far as pack() needs it. Throws Exception (kind corruption), which names `where`, for any other
// JSON.
std::vector<UnitSpec> parse_unit_list(const nlohmann::json& list, const std::string& where);

}  // namespace tierflow

#pragma once
// The units of a model as text, for a store whose model no config.json describes: a JSON array with each unit's name
// and tensors; of a tensor its name, shape, format, and whether it is trained and has its moments in fp32.
#include <string>
#include <vector>

#include "runtime/spec/model_spec.h"

namespace tierflow {

std::string unit_list(const std::vector<UnitSpec>& units);
// What pack() needs of them. Throws Exception (kind corruption) naming `where` for any other text.
std::vector<UnitSpec> parse_unit_list(const std::string& text, const std::string& where);

}  // namespace tierflow

#include "runtime/spec/unit_list.h"

#include <nlohmann/json.hpp>

#include "runtime/base/exception.h"

namespace tierflow {

using nlohmann::json;

json unit_list(const std::vector<UnitSpec>& units) {
  json list = json::array();
  for (const UnitSpec& unit : units) {
    json tensors = json::array();
    for (const TensorSpec& tensor : unit.tensors)
      tensors.push_back(
          {tensor.name, tensor.shape, weight_format_name(tensor.format), tensor.trainable, tensor.moments_32});
    list.push_back({unit.name, std::move(tensors)});
  }
  return list;
}

std::vector<UnitSpec> parse_unit_list(const json& list, const std::string& where) {
  std::vector<UnitSpec> units;
  try {
    for (const json& unit : list) {
      UnitSpec& spec = units.emplace_back(UnitSpec{.name = unit.at(0).get<std::string>()});
      for (const json& tensor : unit.at(1)) {
        TensorSpec& of = spec.tensors.emplace_back();
        of.name = tensor.at(0).get<std::string>();
        of.shape = tensor.at(1).get<std::vector<std::int64_t>>();
        const auto format = tensor.at(2).get<std::string>();  // an option never names fp32
        of.format = format == weight_format_name(WeightFormat::fp32) ? WeightFormat::fp32 : parse_weight_format(format);
        of.trainable = tensor.at(3).get<bool>();
        of.moments_32 = tensor.at(4).get<bool>();
      }
    }
  } catch (const std::exception& error) {
    fail(io::ErrorKind::corruption, where, std::string("the store does not say which model it holds: ") + error.what());
  }
  return units;
}

}  // namespace tierflow

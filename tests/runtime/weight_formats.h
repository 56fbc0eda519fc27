#pragma once
// Every format of weights, as parameters of tests.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "runtime/spec/weight_format.h"

namespace tierflow::testing {

inline auto every_weight_format() {
  return ::testing::Values(WeightFormat::bf16, WeightFormat::int8, WeightFormat::nf4, WeightFormat::nf4_double,
                           WeightFormat::fp8, WeightFormat::fp8_rows, WeightFormat::mxfp4);
}

// Its name where a test's name may have it.
inline std::string weight_format_test_name(const ::testing::TestParamInfo<WeightFormat>& info) {
  std::string name = weight_format_name(info.param);
  std::ranges::replace(name, '-', '_');
  return name;
}

}  // namespace tierflow::testing

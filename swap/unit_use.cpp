#include "swap/unit_use.h"

namespace tierflow::swap {
namespace {

constexpr std::uint64_t kOfVisit = 1 << 16;
constexpr std::uint64_t kForgets = 16;  // each visit of the stage takes one part of so many away

}  // namespace

void UnitUse::count(int stage, const std::vector<int>& needed) {
  for (const int unit : layout_.stages()[stage].on_demand) use_[unit] -= use_[unit] / kForgets;
  for (const int unit : needed) use_[unit] += kOfVisit;
}

}  // namespace tierflow::swap

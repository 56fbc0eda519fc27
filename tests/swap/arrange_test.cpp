// Budgets into arrangements: what waits for the next forward.
#include "swap/arrange.h"

#include <gtest/gtest.h>

namespace tierflow::swap {
namespace {

constexpr std::uint64_t kMiB = 1 << 20;

TEST(Arrange, DefersAShareOfEachUnit) {
  std::vector<UnitShape> units;
  std::vector<StageShape> stages;
  for (int unit = 0; unit < 6; ++unit) {
    const std::uint64_t elements = (130 + 40 * static_cast<std::uint64_t>(unit)) * 1024;
    units.push_back({.name = "unit", .groups = {{.elements = elements, .state_bytes_element = 4, .precision = "a"}}});
    stages.push_back({.units = {unit}, .carry_bytes = unit == 0 ? 0 : kSector});
  }
  const Layout layout(units, stages, kChunkQuantum);
  for (const double share : {0.0, 0.25, 0.5, 0.75, 1.0}) {
    const Arrangement arrangement =
        arrange(layout,
                {.host_budget = 64 * kMiB, .device_budget = 64 * kMiB, .staged = false, .deferred_share = share})
            .value();
    EXPECT_EQ(arrangement.gradient_resident, arrangement.deferred);  // where everything is resident
    for (int unit = 0; unit < static_cast<int>(layout.units().size()); ++unit) {
      double deferred = 0;
      for (const Chunk& chunk : layout.chunks_of(unit))
        if (arrangement.deferred[layout.first_chunk(unit) + chunk.index])
          deferred += static_cast<double>(chunk.elements);
      EXPECT_NEAR(deferred, share * static_cast<double>(layout.unit_elements(unit)), kChunkQuantum) << unit;
    }
  }
  // Without storage gradients that do not fit are not deferred; the run is not refused for them.
  ArrangeRequest request{.device_budget = 64 * kMiB, .staged = false, .storage = false};
  for (request.host_budget = kMiB; !arrange(layout, request).ok();) request.host_budget += 64 * 1024;
  request.deferred_share = 1;
  EXPECT_EQ(arrange(layout, request).value().deferred, std::vector<bool>(layout.chunks().size(), false));
  request.host_budget += 64 * kMiB;
  EXPECT_EQ(arrange(layout, request).value().deferred, std::vector<bool>(layout.chunks().size(), true));
}

}  // namespace
}  // namespace tierflow::swap

#include "swap/hazards.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tierflow::swap {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

Access device(std::uint64_t begin, std::uint64_t end, bool writes) {
  return {Space::device, begin, end, writes};
}
Access buffer(std::uint64_t index, bool writes) {
  return {Space::word_buffer, index, index + 1, writes};
}

TEST(Hazards, ReadFollowsTheLastWrite) {
  HazardTracker tracker;
  EXPECT_THAT(tracker.add(0, {buffer(3, true)}), IsEmpty());
  EXPECT_THAT(tracker.add(1, {buffer(3, false)}), ElementsAre(0));
  EXPECT_THAT(tracker.add(2, {buffer(3, false)}), ElementsAre(0));
  EXPECT_THAT(tracker.add(3, {buffer(4, false)}), IsEmpty());
}

TEST(Hazards, WriteFollowsWriteAndEveryReadSince) {
  HazardTracker tracker;
  tracker.add(0, {buffer(0, true)});
  tracker.add(1, {buffer(0, false)});
  tracker.add(2, {buffer(0, false)});
  EXPECT_THAT(tracker.add(3, {buffer(0, true)}), ElementsAre(0, 1, 2));
  EXPECT_THAT(tracker.add(4, {buffer(0, false)}), ElementsAre(3));
}

TEST(Hazards, RangesMeetWhereTheyOverlap) {
  HazardTracker tracker;
  tracker.add(0, {device(0, 100, true)});
  tracker.add(1, {device(100, 200, true)});
  EXPECT_THAT(tracker.add(2, {device(50, 150, false)}), ElementsAre(0, 1));
  EXPECT_THAT(tracker.add(3, {device(0, 60, true)}), ElementsAre(0, 2));
  EXPECT_THAT(tracker.add(4, {device(60, 100, false)}), ElementsAre(0));  // what task 3 left of task 0
  EXPECT_THAT(tracker.add(5, {device(120, 130, true)}), ElementsAre(1, 2));
  EXPECT_THAT(tracker.add(6, {device(0, 200, true)}), ElementsAre(0, 1, 2, 3, 4, 5));
  EXPECT_THAT(tracker.add(7, {device(199, 200, false)}), ElementsAre(6));
}

TEST(Hazards, ATaskDoesNotWaitForItself) {
  HazardTracker tracker;
  EXPECT_THAT(tracker.add(0, {buffer(0, false), buffer(0, true)}), IsEmpty());
}

}  // namespace
}  // namespace tierflow::swap

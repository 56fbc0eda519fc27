// Bytes that changed between producer and consumer: each way they can do so must show in the checksum that the consumer
// verifies.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <random>

#include "io/checksum.h"
#include "io/member.h"
#include "tests/io/volume_fixture.h"
#include "tests/support/faulty_backend.h"

namespace tierflow::io {
namespace {

constexpr std::uint64_t kRun = 77;
constexpr std::size_t kExtent = 64 << 10;
constexpr std::uint64_t kExtents = 8;

class IntegrityTest : public ::testing::Test {
 protected:
  IntegrityTest() {
    VolumeOptions options = options_in(folder_, kExtent * kExtents);
    options.wrap_backend = testing::faults(plan_);
    volume_ = create(options);
    for (std::uint64_t extent = 0; extent < kExtents; ++extent) write(extent, 1);
  }

  void write(std::uint64_t extent, std::uint64_t generation) {
    Buffer buffer = allocate_buffer(kExtent);
    fill(buffer.bytes(), extent * kExtent, generation);
    sums_[extent] = extent_checksum(kRun, extent, generation, buffer.bytes());
    generations_[extent] = generation;
    EXPECT_FALSE(transfer(*volume_, Op::write, extent * kExtent, kExtent, std::move(buffer)).error);
  }
  bool sound(std::uint64_t extent) {
    Completion read = transfer(*volume_, Op::read, extent * kExtent, kExtent, allocate_buffer(kExtent));
    EXPECT_FALSE(read.error) << read.error.message();
    return extent_checksum(kRun, extent, generations_[extent], read.buffer.bytes()) == sums_[extent];
  }
  // The data file as somebody else would change it.
  int tamper() { return ::open((folder_.path() / "drive" / "state.tfv").c_str(), O_RDWR | O_CLOEXEC); }

  testing::TempDir folder_;
  std::shared_ptr<testing::FaultPlan> plan_ = std::make_shared<testing::FaultPlan>();
  std::unique_ptr<Volume> volume_;
  std::uint64_t sums_[kExtents] = {};
  std::uint64_t generations_[kExtents] = {};
};

TEST_F(IntegrityTest, EveryBitFlippedAtRestIsSeen) {
  const int descriptor = tamper();
  std::mt19937_64 random(3);
  for (int round = 0; round < 200; ++round) {
    const std::uint64_t extent = random() % kExtents;
    const auto position = static_cast<off_t>(kDataStart + extent * kExtent + random() % kExtent);
    unsigned char byte = 0;
    ASSERT_EQ(pread(descriptor, &byte, 1, position), 1);
    const unsigned char wrong = byte ^ static_cast<unsigned char>(1U << (random() % 8));
    ASSERT_EQ(pwrite(descriptor, &wrong, 1, position), 1);
    EXPECT_FALSE(sound(extent));
    EXPECT_FALSE(sound(extent));  // reading again does not help
    ASSERT_EQ(pwrite(descriptor, &byte, 1, position), 1);
    EXPECT_TRUE(sound(extent));
  }
  close(descriptor);
}

TEST_F(IntegrityTest, AFlipOnTheWayIsSeenAndReadingAgainHelps) {
  for (std::uint64_t extent = 0; extent < kExtents; ++extent) {
    plan_->set({.kind = testing::Fault::Kind::flip, .action = Action::read});
    EXPECT_FALSE(sound(extent));
    EXPECT_TRUE(sound(extent));
  }
}

TEST_F(IntegrityTest, ExtentsThatChangedPlacesAreSeen) {
  const int descriptor = tamper();
  std::vector<char> a(kExtent), b(kExtent);
  const auto place = [](std::uint64_t extent) { return static_cast<off_t>(kDataStart + extent * kExtent); };
  ASSERT_EQ(pread(descriptor, a.data(), kExtent, place(2)), static_cast<ssize_t>(kExtent));
  ASSERT_EQ(pread(descriptor, b.data(), kExtent, place(5)), static_cast<ssize_t>(kExtent));
  ASSERT_EQ(pwrite(descriptor, b.data(), kExtent, place(2)), static_cast<ssize_t>(kExtent));
  ASSERT_EQ(pwrite(descriptor, a.data(), kExtent, place(5)), static_cast<ssize_t>(kExtent));
  close(descriptor);
  EXPECT_FALSE(sound(2));
  EXPECT_FALSE(sound(5));
  EXPECT_TRUE(sound(3));
}

TEST_F(IntegrityTest, AnOlderGenerationIsSeen) {
  const int descriptor = tamper();
  std::vector<char> old(kExtent);
  const auto place = static_cast<off_t>(kDataStart + 4 * kExtent);
  ASSERT_EQ(pread(descriptor, old.data(), kExtent, place), static_cast<ssize_t>(kExtent));
  write(4, 2);
  EXPECT_TRUE(sound(4));
  ASSERT_EQ(pwrite(descriptor, old.data(), kExtent, place), static_cast<ssize_t>(kExtent));
  close(descriptor);
  EXPECT_FALSE(sound(4));
}

TEST_F(IntegrityTest, TheSameBytesFromAnotherRunOrGenerationAreSeen) {
  Buffer buffer = allocate_buffer(kExtent);
  fill(buffer.bytes(), 0, 1);
  EXPECT_EQ(extent_checksum(kRun, 0, 1, buffer.bytes()), sums_[0]);
  EXPECT_NE(extent_checksum(kRun + 1, 0, 1, buffer.bytes()), sums_[0]);
  EXPECT_NE(extent_checksum(kRun, 0, 2, buffer.bytes()), sums_[0]);
}

TEST_F(IntegrityTest, AHoleInTheFileIsSeen) {
  const int descriptor = tamper();
  if (fallocate(descriptor, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, kDataStart + 6 * kExtent, 4096) != 0) {
    close(descriptor);
    GTEST_SKIP() << "this file system punches no holes";
  }
  close(descriptor);
  EXPECT_FALSE(sound(6));
  EXPECT_TRUE(sound(7));
}

}  // namespace
}  // namespace tierflow::io

// Power cuts under a real file system: ext4 on a loop device on a drive that records what it is given. A run commits;
// afterwards the drive is made to hold what it might hold had the power gone at some moment: all that a flush covered,
// any of what came after it, the last write torn. Then the file system is mounted and the run goes on.
// TIERFLOW_POWER_CUTS is how many moments (make test-faults: 1,000).
#include <gtest/gtest.h>

#include <random>

#include "tests/support/environment.h"
#include "tests/support/forwarding_backend.h"
#include "tests/support/fuse_disk.h"
#include "tests/support/mounts.h"
#include "tests/swap/store_fixture.h"

namespace tierflow::swap {
namespace {

using testing::DriveRecord;
using testing::FuseDisk;
using testing::LoopDisk;

constexpr std::uint64_t kDiskBytes = std::uint64_t{40} << 20;
constexpr int kCommits = 6;
constexpr std::size_t kTorn = 512;  // a drive writes this many bytes whole

// Says that it flushed, and did not.
class NeverFlushes final : public testing::ForwardingBackend {
 public:
  using ForwardingBackend::ForwardingBackend;
  bool push(const io::KernelOp& op) override {
    return op.action == io::Action::flush ? answer(op, 0) : ForwardingBackend::push(op);
  }
};

struct PowerCutDisk : ::testing::Test {
  // Commits kCommits generations; what the drive had been given when each was acknowledged.
  void commit_all(std::function<std::unique_ptr<io::Backend>(std::unique_ptr<io::Backend>)> wrap = {}) {
    LoopDisk disk(folder_.path(), drive_.file());
    ASSERT_TRUE(disk.ready());
    formatted_ = drive_.record().entries;
    StoreOptions options = options_in(disk.path() / "store", 2, std::move(wrap));
    options.volume.allow_buffered = options.volume.allow_any_filesystem = false;
    const auto store = create(options);
    for (int value = 1; value <= kCommits; ++value) {
      ASSERT_OK(write_and_commit(*store, value));
      acknowledged_.push_back(drive_.record().entries);
    }
    ASSERT_FALSE(drive_.record().full);
  }

  // The drive as it may be when the power goes after `cut` of what it was given.
  void cut_power(std::size_t cut, std::mt19937_64& random) {
    const DriveRecord& record = drive_.record();
    std::size_t durable = 0;
    for (std::size_t i = 0; i < cut; ++i)
      if (record.entry[i].flush) durable = i;
    std::fill(drive_.bytes().begin(), drive_.bytes().end(), 0);
    const int survivors = static_cast<int>(random() % 5);
    const std::size_t spared = durable + random() % std::max<std::size_t>(1, cut - durable);
    for (std::size_t i = 0; i < cut; ++i) {
      const DriveRecord::Entry& entry = record.entry[i];
      const bool survives = i < durable || survivors == 0 || (survivors == 1 && i + 1 == cut) ||
                            (survivors == 2 && i != spared) || (survivors == 3 && random() % 2 == 0);
      if (entry.flush || !survives) continue;
      const bool torn = i >= durable && random() % 4 == 0;
      for (std::uint64_t at = 0; at < entry.length; at += kTorn)
        if (!torn || random() % 2 == 0)
          std::memcpy(drive_.bytes().data() + entry.offset + at, record.bytes + entry.data + at,
                      std::min<std::uint64_t>(kTorn, entry.length - at));
    }
  }

  // What is wrong after the power went then; empty: nothing.
  std::string wrong_after(std::size_t cut, std::mt19937_64& random) {
    cut_power(cut, random);
    const auto committed =
        std::count_if(acknowledged_.begin(), acknowledged_.end(), [&](std::size_t at) { return at <= cut; });
    LoopDisk disk(folder_.path(), drive_.file(), true);
    if (!disk.ready()) return "the file system cannot be mounted";
    auto store = Store::resume(options_in(disk.path() / "store", 2), layout());
    if (!store)
      return committed == 0 ? "" : "lost generation " + std::to_string(committed) + ": " + store.error().message();
    std::string wrong;
    const io::Error error = (*store)->restore(
        [&](ExtentKind kind, int index, std::span<const std::byte> bytes) {
          const int value = static_cast<int>((*store)->generation());
          for (std::uint64_t i = 0; i < bytes.size() && wrong.empty(); ++i)
            if (bytes[i] != byte_of(kind, index, value, i)) wrong = "bytes that were not committed";
        },
        {});
    if (error) return committed == 0 ? "" : "lost generation " + std::to_string(committed) + ": " + error.message();
    if (!wrong.empty()) return wrong;
    if (static_cast<std::int64_t>((*store)->generation()) < committed)
      return "generation " + std::to_string((*store)->generation()) + " after " + std::to_string(committed) +
             " was acknowledged";
    return (*store)->progress() == step(static_cast<int>((*store)->generation())) ? "" : "another step's progress";
  }
  std::size_t moment(std::mt19937_64& random) const {
    return formatted_ + 1 + random() % (acknowledged_.back() - formatted_);
  }

  testing::TempDir folder_;
  FuseDisk drive_{folder_.path(), kDiskBytes, true};
  std::size_t formatted_ = 0;
  std::vector<std::size_t> acknowledged_;
};

#define NEED_DRIVE()                                                       \
  if (!drive_.ready() || !LoopDisk(folder_.path(), drive_.file()).ready()) \
  GTEST_SKIP() << "this machine does not let us serve a drive (needs root, /dev/fuse, loop devices)"

TEST_F(PowerCutDisk, TheNewestAcknowledgedGenerationIsThere) {
  NEED_DRIVE();
  ASSERT_NO_FATAL_FAILURE(commit_all());
  const int cuts = static_cast<int>(testing::number_in("TIERFLOW_POWER_CUTS", 12));
  std::mt19937_64 random(11);
  for (int i = 0; i < cuts; ++i) {
    const std::size_t cut = moment(random);
    ASSERT_EQ(wrong_after(cut, random), "") << "cut " << i << ", after " << cut << " of " << acknowledged_.back();
  }
}

TEST_F(PowerCutDisk, AFlushThatLiesIsNoticed) {
  NEED_DRIVE();
  ASSERT_NO_FATAL_FAILURE(commit_all([](std::unique_ptr<io::Backend> inner) -> std::unique_ptr<io::Backend> {
    return std::make_unique<NeverFlushes>(std::move(inner));
  }));
  std::mt19937_64 random(11);
  bool noticed = false;
  for (int i = 0; i < 40 && !noticed; ++i) noticed = !wrong_after(moment(random), random).empty();
  EXPECT_TRUE(noticed);
}

}  // namespace
}  // namespace tierflow::swap

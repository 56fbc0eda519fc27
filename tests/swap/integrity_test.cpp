// Bytes that changed between producer and consumer: each way they can do so must show where the store verifies them.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <future>
#include <random>

#include "io/checksum.h"
#include "swap/layout.h"
#include "swap/store.h"
#include "tests/support/faulty_backend.h"
#include "tests/support/temp_dir.h"

namespace tierflow::swap {
namespace {

using testing::Fault;

constexpr std::uint64_t kDataArea = std::uint64_t{1} << 20;  // of the data file: io/member.h

std::vector<UnitShape> units() {
  std::vector<UnitShape> units;
  for (const char* name : {"embedding", "block", "head"})
    units.push_back({.name = name, .groups = {{.elements = 128 * 1024, .state_bytes_element = 4, .precision = "a"}}});
  return units;
}

std::vector<StageShape> stages() {
  return {{.units = {0}, .backward_needs_weights = false},
          {.units = {1}, .carry_bytes = 4096},
          {.units = {2}, .carry_bytes = 4096}};
}

std::vector<std::byte> bytes_for(ExtentKind kind, int index, std::size_t size, unsigned seed) {
  std::vector<std::byte> bytes(size);
  std::mt19937 random(seed * 1000 + static_cast<unsigned>(kind) * 100 + static_cast<unsigned>(index));
  for (std::byte& value : bytes) value = static_cast<std::byte>(random());
  return bytes;
}

class IntegrityTest : public ::testing::Test {
 protected:
  void SetUp() override { store_ = make(folder_.path()); }
  void TearDown() override {
    if (file_ >= 0) close(file_);
  }

  std::unique_ptr<Store> make(const std::filesystem::path& folder) {
    auto made = Store::create({.volume = {.folders = {folder},
                                          .allow_buffered = true,
                                          .allow_any_filesystem = true,
                                          .on_notice =
                                              [this](const io::Notice& notice) {
                                                if (notice.kind == io::Notice::Kind::retried) ++second_readings_;
                                              },
                                          .wrap_backend = testing::faults(plan_)}},
                              layout_);
    EXPECT_TRUE(made.ok()) << made.error().message();
    std::unique_ptr<Store> store = std::move(made).value();
    for (int id = 0; id < chunks(); ++id)
      for (const ExtentKind kind : {ExtentKind::hi, ExtentKind::state}) write(*store, kind, id, 1);
    return store;
  }
  int chunks() const { return static_cast<int>(layout_.chunks().size()); }

  void write(Store& store, ExtentKind kind, int id, unsigned seed) {
    const std::vector<std::byte> bytes = bytes_for(kind, id, store.extent_bytes(kind, id), seed);
    io::Buffer buffer = io::allocate_buffer(bytes.size());
    std::copy(bytes.begin(), bytes.end(), buffer.data());
    store.stamp(kind, id, buffer.bytes());
    std::promise<io::Error> ended;
    store.write(kind, id, std::move(buffer),
                [&ended](io::Completion&& completion) { ended.set_value(std::move(completion.error)); });
    EXPECT_FALSE(ended.get_future().get());
  }
  // What a consumer gets: the right bytes, or corruption that names the extent; never others.
  bool sound(ExtentKind kind, int id, unsigned seed = 1) {
    const auto fetched = store_->fetch(kind, id);
    if (!fetched.ok()) {
      EXPECT_EQ(fetched.error().kind, io::ErrorKind::corruption) << fetched.error().message();
      EXPECT_EQ(fetched.error().offset, place(kind, id));
      EXPECT_EQ(fetched.error().path, layout_.units()[layout_.chunks()[id].unit].name);
      return false;
    }
    const std::vector<std::byte> expected = bytes_for(kind, id, store_->extent_bytes(kind, id), seed);
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), fetched.value().data()));
    return true;
  }
  // In the volume: verify() names it.
  std::uint64_t place(ExtentKind kind, int id) const {
    const std::vector<std::byte> wrong(store_->extent_bytes(kind, id));
    return store_->verify(kind, id, wrong).offset;
  }
  // The data file as somebody else would read or change it.
  int file() {
    if (file_ < 0) file_ = ::open((folder_.path() / "state.tfv").c_str(), O_RDWR | O_CLOEXEC);
    EXPECT_GE(file_, 0);
    return file_;
  }
  std::vector<char> peek(ExtentKind kind, int id) {
    std::vector<char> bytes(store_->extent_bytes(kind, id));
    EXPECT_EQ(pread(file(), bytes.data(), bytes.size(), static_cast<off_t>(kDataArea + place(kind, id))),
              static_cast<ssize_t>(bytes.size()));
    return bytes;
  }
  void poke(ExtentKind kind, int id, const std::vector<char>& bytes, std::uint64_t at = 0) {
    EXPECT_EQ(pwrite(file(), bytes.data(), bytes.size(), static_cast<off_t>(kDataArea + place(kind, id) + at)),
              static_cast<ssize_t>(bytes.size()));
  }

  testing::TempDir folder_;
  std::shared_ptr<testing::FaultPlan> plan_ = std::make_shared<testing::FaultPlan>();
  const Layout layout_{units(), stages(), kChunkQuantum};
  std::atomic<int> second_readings_{0};
  std::unique_ptr<Store> store_;
  int file_ = -1;
};

TEST_F(IntegrityTest, EveryBitFlippedAtRestIsSeen) {
  std::mt19937_64 random(3);
  for (int round = 0; round < 100; ++round) {
    const ExtentKind kind = round % 2 == 0 ? ExtentKind::hi : ExtentKind::state;
    const int id = static_cast<int>(random() % static_cast<std::uint64_t>(chunks()));
    const std::uint64_t at = random() % store_->extent_bytes(kind, id);
    const char was = peek(kind, id)[at];
    poke(kind, id, {static_cast<char>(was ^ (1 << (random() % 8)))}, at);
    const int before = second_readings_;
    EXPECT_FALSE(sound(kind, id));
    EXPECT_EQ(second_readings_, before + 1);  // it was read once more, which did not help
    poke(kind, id, {was}, at);
    EXPECT_TRUE(sound(kind, id));
  }
}

TEST_F(IntegrityTest, AFlipOnTheWayIsSeenAndReadingAgainHelps) {
  for (int id = 0; id < chunks(); ++id) {
    plan_->set({.kind = Fault::Kind::flip, .action = io::Action::read});
    EXPECT_TRUE(sound(ExtentKind::hi, id));
    EXPECT_EQ(plan_->hits(), 1U);
    EXPECT_EQ(second_readings_, id + 1);
  }
}

TEST_F(IntegrityTest, ExtentsThatChangedPlacesAreSeen) {
  const std::vector<char> a = peek(ExtentKind::hi, 0), b = peek(ExtentKind::hi, 1);
  ASSERT_EQ(a.size(), b.size());
  poke(ExtentKind::hi, 0, b);
  poke(ExtentKind::hi, 1, a);
  EXPECT_FALSE(sound(ExtentKind::hi, 0));
  EXPECT_FALSE(sound(ExtentKind::hi, 1));
  EXPECT_TRUE(sound(ExtentKind::hi, 2));
}

TEST_F(IntegrityTest, AnOlderGenerationIsSeen) {
  const std::vector<char> old = peek(ExtentKind::state, 1);
  ASSERT_FALSE(store_->commit("{}"));
  write(*store_, ExtentKind::state, 1, 2);
  EXPECT_TRUE(sound(ExtentKind::state, 1, 2));
  poke(ExtentKind::state, 1, old);
  EXPECT_FALSE(sound(ExtentKind::state, 1, 2));
}

// The bytes are those of the records, but of a run with another number.
TEST_F(IntegrityTest, TheSameBytesOfAnotherRunAreSeen) {
  ASSERT_FALSE(store_->commit("{}"));
  store_.reset();
  const StoreOptions options{
      .volume = {.folders = {folder_.path()}, .allow_buffered = true, .allow_any_filesystem = true}};
  {
    auto opened = Store::open(options, layout_);
    ASSERT_TRUE(opened.ok()) << opened.error().message();
    EXPECT_TRUE(opened.value()->fetch(ExtentKind::hi, 0).ok());
  }
  int changed = 0;
  for (const std::uint64_t copy : {kDataArea, 2 * kDataArea}) {  // superblocks: docs/store.md
    std::array<std::uint64_t, 8> block{};                        // magic, version, run id, ..., checksum
    ASSERT_EQ(pread(file(), block.data(), sizeof block, static_cast<off_t>(copy)), 64);
    if (block[0] == 0) continue;
    ++block[2];
    block[7] = io::content_hash(std::as_bytes(std::span(block)).first(56));
    ASSERT_EQ(pwrite(file(), block.data(), sizeof block, static_cast<off_t>(copy)), 64);
    ++changed;
  }
  EXPECT_EQ(changed, 1);
  auto opened = Store::open(options, layout_);
  ASSERT_TRUE(opened.ok()) << opened.error().message();
  for (int id = 0; id < chunks(); ++id) {
    for (const ExtentKind kind : {ExtentKind::hi, ExtentKind::state}) {
      const auto fetched = opened.value()->fetch(kind, id);
      ASSERT_FALSE(fetched.ok());
      EXPECT_EQ(fetched.error().kind, io::ErrorKind::corruption);
    }
  }
}

TEST_F(IntegrityTest, AHoleInTheFileIsSeen) {
  if (fallocate(file(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                static_cast<off_t>(kDataArea + place(ExtentKind::hi, 2)), 4096) != 0)
    GTEST_SKIP() << "this file system punches no holes";
  EXPECT_FALSE(sound(ExtentKind::hi, 2));
  EXPECT_TRUE(sound(ExtentKind::hi, 1));
}

}  // namespace
}  // namespace tierflow::swap

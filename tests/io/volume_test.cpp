#include "io/volume.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <future>
#include <random>
#include <thread>

#include "io/discard.h"
#include "io/member.h"
#include "tests/io/volume_fixture.h"

namespace tierflow::io {
namespace {

using ::testing::HasSubstr;

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

class VolumeTest : public ::testing::TestWithParam<std::tuple<EngineKind, unsigned>> {
 protected:
  VolumeOptions options(std::uint64_t bytes) {
    VolumeOptions options = options_in(folder_, bytes);
    options.engine = std::get<0>(GetParam());
    options.folders.clear();
    for (unsigned i = 0; i < std::get<1>(GetParam()); ++i) {
      options.folders.push_back(folder_.path() / ("drive" + std::to_string(i)));
    }
    options.block = 64 << 10;
    return options;
  }
  testing::TempDir folder_;
};

TEST_P(VolumeTest, KeepsBytesAcrossClosingAndOpening) {
  VolumeOptions wanted = options(9 * kMiB + 12345);
  {
    auto volume = create(wanted);
    ASSERT_TRUE(volume);
    EXPECT_GE(volume->size(), wanted.bytes);
    EXPECT_EQ(volume->size() % volume->alignment(), 0U);
    EXPECT_FALSE(write_pattern(*volume, 0, volume->size(), 1));
    EXPECT_FALSE(write_pattern(*volume, 3 * kMiB - 4096, kMiB + 8192, 2));
    EXPECT_FALSE(volume->flush());
  }
  std::reverse(wanted.folders.begin(), wanted.folders.end());  // the order given at open does not matter
  wanted.block = 1 << 20;                                      // nor does the block
  Result<std::unique_ptr<Volume>> opened = Volume::open(wanted);
  ASSERT_TRUE(opened.ok()) << opened.error().message();
  Volume& volume = **opened;
  EXPECT_TRUE(read_holds(volume, 0, 3 * kMiB - 4096, 1));
  EXPECT_TRUE(read_holds(volume, 3 * kMiB - 4096, kMiB + 8192, 2));
  EXPECT_TRUE(read_holds(volume, 4 * kMiB + 4096, volume.size() - 4 * kMiB - 4096, 1));
  // Each drive by the folder that has its file, in the order of their creation.
  const std::vector<DriveStats> stats = volume.stats();
  ASSERT_EQ(stats.size(), wanted.folders.size());
  for (std::size_t i = 0; i < stats.size(); ++i) EXPECT_EQ(stats[i].directory, wanted.folders.rbegin()[i]);
}

TEST_P(VolumeTest, ManyThreadsManyRequests) {
  VolumeOptions wanted = options(32 * kMiB);
  wanted.depth = 4;
  auto volume = create(wanted);
  ASSERT_TRUE(volume);
  Buffer slab = allocate_buffer(kMiB);
  volume->register_memory(slab.bytes());
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (unsigned t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      for (int round = 0; round < 40; ++round) {
        const std::size_t length = (random() % 40 + 1) * 4096;
        const std::uint64_t offset = t * 8 * kMiB + random() % (8 * kMiB - length) / 4096 * 4096;
        const std::uint64_t seed = random();
        if (write_pattern(*volume, offset, length, seed) || !read_holds(*volume, offset, length, seed)) ++wrong;
        if (round % 10 == 0 && volume->flush()) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  std::uint64_t read = 0, written = 0;
  for (const DriveStats& drive : volume->stats()) {
    read += drive.bytes_read;
    written += drive.bytes_written;
  }
  EXPECT_EQ(read, written);
  EXPECT_GT(read, 0U);
}

TEST_P(VolumeTest, DestructorDrainsAndCallbacksMaySubmit) {
  std::atomic<int> completed{0};
  {
    auto volume = create(options(8 * kMiB));
    ASSERT_TRUE(volume);
    Volume* raw = volume.get();
    for (std::uint64_t i = 0; i < 64; ++i) {
      raw->submit(Request{.op = Op::write, .offset = i * 4096, .length = 4096, .buffer = allocate_buffer(4096)},
                  [&completed, raw, i](Completion&& first) {
                    EXPECT_FALSE(first.error);
                    ++completed;
                    raw->submit(
                        Request{.op = Op::read, .offset = i * 4096, .length = 4096, .buffer = std::move(first.buffer)},
                        [&completed](Completion&& second) {
                          EXPECT_FALSE(second.error);
                          EXPECT_EQ(second.buffer.size(), 4096U);
                          ++completed;
                        });
                  });
    }
  }
  EXPECT_EQ(completed, 128);
}

TEST_P(VolumeTest, BadRequestsAreUsageErrorsAndGiveTheBufferBack) {
  auto volume = create(options(kMiB));
  ASSERT_TRUE(volume);
  const auto refused = [&](std::uint64_t offset, std::size_t length, std::size_t size) {
    Completion completion = transfer(*volume, Op::read, offset, length, allocate_buffer(size));
    EXPECT_EQ(completion.buffer.size(), size);
    return completion.error.kind == ErrorKind::usage;
  };
  EXPECT_TRUE(refused(1, 4096, 8192));
  EXPECT_TRUE(refused(0, 4095, 8192));
  EXPECT_TRUE(refused(0, 8192, 4096));
  EXPECT_TRUE(refused(kMiB, 4096, 4096));
  EXPECT_TRUE(refused(~std::uint64_t{0} - 4095, 8192, 8192));
  Buffer memory = allocate_buffer(16384);
  const Completion crooked = transfer(*volume, Op::read, 0, 4096, Buffer(memory.data() + 512, 8192, nullptr, nullptr));
  EXPECT_EQ(crooked.error.kind, ErrorKind::usage);
  EXPECT_THAT(crooked.error.message(), HasSubstr("multiples of"));
  // The last bytes are there, the next are not.
  EXPECT_FALSE(transfer(*volume, Op::read, volume->size() - 4096, 4096, allocate_buffer(4096)).error);
  const Completion beyond = transfer(*volume, Op::write, volume->size() - 4096, 8192, allocate_buffer(8192));
  EXPECT_EQ(beyond.error.kind, ErrorKind::usage);
  EXPECT_EQ(beyond.error.operation, "write");
  EXPECT_EQ(beyond.error.offset, volume->size() - 4096);
  EXPECT_EQ(beyond.error.length, 8192U);
  EXPECT_THAT(beyond.error.message(), HasSubstr("beyond"));
  Completion empty = transfer(*volume, Op::write, 4096, 0, Buffer());
  EXPECT_FALSE(empty.error);
  EXPECT_FALSE(wait_for([&](Callback done) { volume->submit({}, std::move(done)); }).error);
}

std::string case_name(const ::testing::TestParamInfo<VolumeTest::ParamType>& info) {
  constexpr const char* kNames[] = {"automatic", "io_uring", "libaio", "threads"};
  return std::string(kNames[static_cast<int>(std::get<0>(info.param))]) + "_" + std::to_string(std::get<1>(info.param));
}

INSTANTIATE_TEST_SUITE_P(Engines, VolumeTest,
                         ::testing::Combine(::testing::Values(EngineKind::io_uring, EngineKind::libaio,
                                                              EngineKind::threads),
                                            ::testing::Values(1U, 3U)),
                         case_name);

class VolumeFiles : public ::testing::Test {
 protected:
  VolumeOptions options() { return options_in(folder_, 2 * kMiB); }
  std::filesystem::path file() { return folder_.path() / "drive" / "state.tfv"; }
  Error open_error() {
    Result<std::unique_ptr<Volume>> opened = Volume::open(options());
    return opened ? Error{} : opened.error();
  }
  testing::TempDir folder_;
};

TEST_F(VolumeFiles, IsPrivateWhateverTheUmask) {
  const mode_t old = umask(0);
  auto volume = create(options());
  umask(old);
  struct stat info;
  ASSERT_EQ(stat(file().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0600U);
}

TEST_F(VolumeFiles, SecondOwnerIsRefusedByNameOfTheFirst) {
  auto volume = create(options());
  const Error error = open_error();
  EXPECT_EQ(error.kind, ErrorKind::locked);
  EXPECT_THAT(error.message(), HasSubstr(std::to_string(getpid())));
  volume.reset();
  EXPECT_FALSE(open_error());
}

// Who reads is soon done, and so are the last requests of a process that was killed. A run that trains is not.
TEST_F(VolumeFiles, TheNextOwnerWaitsForReadersAndTheDead) {
  create(options()).reset();
  VolumeOptions reading = options();
  reading.read_only = true;
  std::unique_ptr<Volume> reader = std::move(Volume::open(reading)).value();
  std::thread ends([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    reader.reset();
  });
  EXPECT_FALSE(open_error());
  ends.join();
  const std::string path = file().string();
  for (const bool waited_for : {false, true}) {
    const pid_t owner = fork();
    if (owner == 0) {
      const int file = open(path.c_str(), O_RDWR);
      if (file < 0 || flock(file, LOCK_EX | LOCK_NB) != 0) _exit(1);
      if (fork() == 0) {  // as what the kernel does for the dead: its open file stays for a while
        usleep(400'000);
        _exit(0);
      }
      _exit(0);
    }
    siginfo_t ended;
    ASSERT_EQ(waitid(P_PID, static_cast<id_t>(owner), &ended, WEXITED | (waited_for ? 0 : WNOWAIT)), 0);
    EXPECT_EQ(ended.si_status, 0);
    EXPECT_FALSE(open_error());
    if (!waited_for) waitpid(owner, nullptr, 0);
  }
}

TEST_F(VolumeFiles, IsReadBesideItsOwnerWhereThatIsAskedFor) {
  auto volume = create(options());
  ASSERT_FALSE(write_pattern(*volume, 0, 4096, 3));
  VolumeOptions beside = options();
  beside.read_only = beside.beside_owner = true;
  {
    Result<std::unique_ptr<Volume>> reader = Volume::open(beside);
    ASSERT_TRUE(reader.ok()) << reader.error().message();
    EXPECT_TRUE(read_holds(**reader, 0, 4096, 3));
  }
  EXPECT_EQ(open_error().kind, ErrorKind::locked);
}

TEST_F(VolumeFiles, CreatingOverTheFileOfAnotherRunNamesThatRun) {
  auto volume = create(options());
  const Result<std::unique_ptr<Volume>> second = Volume::create(options());
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.error().kind, ErrorKind::locked);
  EXPECT_THAT(second.error().message(), HasSubstr(std::to_string(getpid())));
  EXPECT_FALSE(volume->flush());
}

TEST_F(VolumeFiles, CreateRefusesWhatIsThereAndLeavesItAlone) {
  {
    auto volume = create(options());
    EXPECT_FALSE(write_pattern(*volume, 0, 4096, 3));
  }
  Result<std::unique_ptr<Volume>> again = Volume::create(options());
  ASSERT_FALSE(again.ok());
  EXPECT_EQ(again.error().error_number, EEXIST);
  auto opened = Volume::open(options());
  ASSERT_TRUE(opened.ok());
  EXPECT_TRUE(read_holds(**opened, 0, 4096, 3));
}

TEST_F(VolumeFiles, DiscardingTakesWhatIsThereUnlessSomebodyHoldsIt) {
  VolumeOptions both = options();
  both.folders = {folder_.path() / "cut", folder_.path() / "drive", folder_.path() / "missing"};
  std::filesystem::create_directories(folder_.path() / "cut");
  std::ofstream(folder_.path() / "cut" / "state.tfv").close();
  auto volume = create(options());
  EXPECT_EQ(discard(both).kind, ErrorKind::locked);
  EXPECT_TRUE(std::filesystem::exists(folder_.path() / "cut" / "state.tfv"));
  EXPECT_TRUE(std::filesystem::exists(file()));
  volume.reset();
  EXPECT_FALSE(discard(both));
  EXPECT_FALSE(std::filesystem::exists(folder_.path() / "cut" / "state.tfv"));
  EXPECT_FALSE(std::filesystem::exists(file()));
  EXPECT_FALSE(discard(both));
}

TEST_F(VolumeFiles, DiscardingIsDoneOnAnyFileSystem) {
  testing::TempDir memory("/dev/shm");
  VolumeOptions there = options();
  there.folders = {memory.path()};
  there.allow_any_filesystem = there.allow_buffered = false;
  EXPECT_FALSE(Volume::create(there).ok()) << "this file system is refused for anything else";
  there.allow_any_filesystem = there.allow_buffered = true;
  create(there).reset();
  ASSERT_TRUE(std::filesystem::exists(memory.path() / "state.tfv"));
  there.allow_any_filesystem = there.allow_buffered = false;
  EXPECT_FALSE(discard(there));
  EXPECT_FALSE(std::filesystem::exists(memory.path() / "state.tfv"));
}

TEST_F(VolumeFiles, FailedCreateLeavesNothingBehind) {
  VolumeOptions wanted = options();
  std::filesystem::create_directories(folder_.path() / "second");
  std::ofstream(folder_.path() / "second" / "state.tfv") << "in the way";
  wanted.folders = {folder_.path() / "a" / "b", folder_.path() / "second"};
  EXPECT_FALSE(Volume::create(wanted).ok());
  EXPECT_FALSE(std::filesystem::exists(folder_.path() / "a"));
  EXPECT_TRUE(std::filesystem::exists(folder_.path() / "second" / "state.tfv"));
}

TEST_F(VolumeFiles, TooLittleSpaceNamesNeededAndFree) {
  VolumeOptions wanted = options();
  wanted.bytes = std::uint64_t{1} << 50;
  Result<std::unique_ptr<Volume>> volume = Volume::create(wanted);
  ASSERT_FALSE(volume.ok());
  EXPECT_EQ(volume.error().kind, ErrorKind::environment);
  EXPECT_THAT(volume.error().message(), HasSubstr(" bytes needed (1048577 GiB), "));
  EXPECT_FALSE(std::filesystem::exists(folder_.path() / "drive"));
}

TEST_F(VolumeFiles, LinksAreNotFollowed) {
  create(options()).reset();
  std::filesystem::rename(file(), folder_.path() / "elsewhere");
  std::filesystem::create_symlink(folder_.path() / "elsewhere", file());
  EXPECT_EQ(open_error().kind, ErrorKind::input);
  EXPECT_FALSE(Volume::create(options()).ok());
  std::filesystem::remove(file());
  std::filesystem::create_hard_link(folder_.path() / "elsewhere", file());
  EXPECT_EQ(open_error().kind, ErrorKind::environment);
}

TEST_F(VolumeFiles, FilesThatOthersCanReachAreRefused) {
  create(options()).reset();
  chmod(file().c_str(), 0644);
  const Error error = open_error();
  EXPECT_EQ(error.kind, ErrorKind::environment);
  EXPECT_THAT(error.message(), HasSubstr("run chmod 600 on it or, where the file system keeps no permissions, mount"));
}

TEST_F(VolumeFiles, OddThingsUnderTheNameAreRefused) {
  std::filesystem::create_directories(folder_.path() / "drive");
  EXPECT_EQ(open_error().error_number, ENOENT);
  ASSERT_EQ(mkfifo(file().c_str(), 0600), 0);
  EXPECT_TRUE(open_error());
  std::filesystem::remove(file());
  std::ofstream(file()) << "short";
  chmod(file().c_str(), 0600);
  EXPECT_EQ(open_error().kind, ErrorKind::input);
  std::filesystem::resize_file(file(), 4 * kMiB);
  EXPECT_EQ(open_error().kind, ErrorKind::input);
}

TEST_F(VolumeFiles, DamagedHeaderAndWrongSizeAreCorruption) {
  create(options()).reset();
  std::filesystem::resize_file(file(), 2 * kMiB);
  EXPECT_EQ(open_error().kind, ErrorKind::corruption);
  std::filesystem::resize_file(file(), 3 * kMiB);
  EXPECT_FALSE(open_error());
  {
    std::fstream bytes(file(), std::ios::in | std::ios::out | std::ios::binary);
    bytes.seekp(45);
    bytes.put('x');
  }
  auto opened = Volume::open(options());
  ASSERT_TRUE(opened.ok()) << opened.error().message();
  EXPECT_THAT((*opened)->mode().warnings, ::testing::Contains(::testing::HasSubstr("second header is whole")));
  (*opened).reset();
  {
    std::fstream bytes(file(), std::ios::in | std::ios::out | std::ios::binary);
    bytes.seekp(static_cast<std::streamoff>(kSecondHeader) + 45);
    bytes.put('x');
  }
  EXPECT_EQ(open_error().kind, ErrorKind::corruption);
}

TEST_F(VolumeFiles, ACreationThatWasInterruptedIsToldFromAVolume) {
  VolumeOptions two = options();
  two.folders = {folder_.path() / "a", folder_.path() / "b"};
  const auto interrupted = [&] {
    Result<bool> found = creation_was_interrupted(two);
    EXPECT_TRUE(found.ok()) << found.error().message();
    return found.ok() && found.value();
  };
  const auto path = [&](const char* name) { return folder_.path() / name / "state.tfv"; };
  const auto write = [&](const char* name, std::uint64_t at) {
    std::fstream bytes(path(name), std::ios::in | std::ios::out | std::ios::binary);
    bytes.seekp(static_cast<std::streamoff>(at));
    bytes.put('x');
  };
  for (const char* name : {"a", "b"}) std::filesystem::create_directory(folder_.path() / name);
  EXPECT_FALSE(interrupted());  // nothing is there
  for (const char* name : {"a", "b"}) {
    std::ofstream(path(name)).close();
    std::filesystem::permissions(path(name), std::filesystem::perms(0600));
    EXPECT_TRUE(interrupted());
    std::filesystem::resize_file(path(name), 2 * kMiB);
    EXPECT_TRUE(interrupted());
  }
  write("a", 45);
  EXPECT_TRUE(interrupted()) << "all files are there, and the second has no header yet";
  write("b", kSecondHeader + 45);
  EXPECT_FALSE(interrupted());
  std::filesystem::remove(path("a"));
  std::filesystem::resize_file(path("b"), 0);
  EXPECT_TRUE(interrupted());
  std::ofstream(path("b")) << "somebody's own";
  EXPECT_FALSE(interrupted());
}

TEST_F(VolumeFiles, PartsOfDifferentVolumesDoNotMix) {
  VolumeOptions a = options(), b = options();
  a.folders = {folder_.path() / "a0", folder_.path() / "a1"};
  b.folders = {folder_.path() / "b0", folder_.path() / "b1"};
  create(a).reset();
  create(b).reset();
  VolumeOptions mixed = a;
  mixed.folders = {folder_.path() / "a0", folder_.path() / "b1"};
  Result<std::unique_ptr<Volume>> opened = Volume::open(mixed);
  ASSERT_FALSE(opened.ok());
  EXPECT_EQ(opened.error().kind, ErrorKind::input);
  mixed.folders = {folder_.path() / "a0"};
  EXPECT_FALSE(Volume::open(mixed).ok());
  EXPECT_TRUE(Volume::open(a).ok());
  // Nor do parts that say different things of one volume.
  const auto part = [&] {
    return File::open(folder_.path() / "a1" / "state.tfv", {.allow_buffered = true, .allow_any_filesystem = true})
        .value();
  };
  const MemberHeader whole = MemberHeader::read(part()).value();
  std::vector<MemberHeader> others(4, whole);
  ++others[0].volume_id[1];
  ++others[1].weights[0];
  others[2].volume_bytes += 4096;
  others[3].stripe_unit *= 2;
  for (const MemberHeader& other : others) {
    EXPECT_FALSE(other.write(part()));
    opened = Volume::open(a);
    ASSERT_FALSE(opened.ok());
    EXPECT_EQ(opened.error().kind, ErrorKind::input);
    EXPECT_THAT(opened.error().message(), HasSubstr("belongs to another volume"));
  }
}

TEST_F(VolumeFiles, FlushNoticesAFileThatWasReplacedOrCut) {
  auto volume = create(options());
  EXPECT_FALSE(volume->flush());
  std::filesystem::resize_file(file(), 2 * kMiB);
  EXPECT_EQ(volume->flush().kind, ErrorKind::corruption);
  std::filesystem::resize_file(file(), 3 * kMiB);
  EXPECT_FALSE(volume->flush());
  std::filesystem::rename(file(), folder_.path() / "moved");
  EXPECT_EQ(volume->flush().kind, ErrorKind::corruption);
}

TEST_F(VolumeFiles, RemovesItsFilesOnRequest) {
  auto volume = create(options());
  volume->remove_files();
  volume.reset();
  EXPECT_FALSE(std::filesystem::exists(file()));
}

TEST_F(VolumeFiles, RemovesTheFoldersItMadeAndNoOthers) {
  VolumeOptions wanted = options();
  for (const bool used : {false, true}) {
    wanted.folders = {folder_.path() / "new" / "drive"};
    auto volume = create(wanted);
    ASSERT_TRUE(volume);
    if (used) std::ofstream(folder_.path() / "new" / "notes.txt") << "a stranger's";
    volume->remove_files();
    volume.reset();
    EXPECT_FALSE(std::filesystem::exists(wanted.folders[0]));
    EXPECT_EQ(std::filesystem::exists(folder_.path() / "new"), used);
  }
  std::filesystem::create_directory(wanted.folders[0]);
  auto volume = create(wanted);
  ASSERT_TRUE(volume);
  volume->remove_files();
  volume.reset();
  EXPECT_TRUE(std::filesystem::exists(wanted.folders[0]));
}

TEST_F(VolumeFiles, WriteLimitIsAnnouncedOnce) {
  std::atomic<int> announced{0};
  std::string text;
  VolumeOptions wanted = options();
  wanted.write_limit = 131'072;
  wanted.on_notice = [&](const Notice& notice) {
    announced += notice.kind == Notice::Kind::write_limit ? 1 : 0;
    text = notice.text;
  };
  auto volume = create(wanted);
  EXPECT_FALSE(write_pattern(*volume, 0, 65536, 1));
  EXPECT_EQ(announced, 0);
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(write_pattern(*volume, 0, 65536, 1));
  volume.reset();
  EXPECT_EQ(announced, 1);
  EXPECT_EQ(text, "131072 bytes written, the limit is 131072");
}

TEST_F(VolumeFiles, APartOfTheVolumeMayNotBeNamedTwiceOrLeftOut) {
  VolumeOptions wanted = options();
  wanted.folders = {folder_.path() / "a", folder_.path() / "b"};
  create(wanted).reset();
  const auto detail = [&](std::vector<std::filesystem::path> folders) {
    VolumeOptions other = wanted;
    other.folders = std::move(folders);
    Result<std::unique_ptr<Volume>> opened = Volume::open(other);
    return opened ? std::string("opened") : opened.error().message();
  };
  EXPECT_THAT(detail({folder_.path() / "a"}), HasSubstr("has 2 folders, 1 were named"));
  std::filesystem::copy(folder_.path() / "a", folder_.path() / "copy");
  EXPECT_THAT(detail({folder_.path() / "a", folder_.path() / "copy"}), HasSubstr("part 0 of the volume is here twice"));
  EXPECT_EQ(detail({folder_.path() / "b", folder_.path() / "a"}), "opened");
}

TEST_F(VolumeFiles, ReservesItsSpaceAndIsNoLargerThanItSays) {
  VolumeOptions wanted = options();
  wanted.bytes = 3 * kMiB + 1;
  auto volume = create(wanted);
  EXPECT_EQ(volume->size(), 3 * kMiB + 4096);
  struct stat info;
  ASSERT_EQ(stat(file().c_str(), &info), 0);
  EXPECT_EQ(static_cast<std::uint64_t>(info.st_size), volume->size() + kMiB);
  if (volume->mode().warnings.empty()) {
    EXPECT_GE(static_cast<std::uint64_t>(info.st_blocks) * 512, 3 * kMiB);
  }
}

TEST_F(VolumeFiles, CallbacksMayNotWaitForFlushes) {
  auto volume = create(options());
  std::promise<Error> said;
  volume->submit(Request{.op = Op::read, .length = 4096, .buffer = allocate_buffer(4096)},
                 [&](Completion&&) { said.set_value(volume->flush()); });
  EXPECT_EQ(said.get_future().get().kind, ErrorKind::usage);
}

TEST_F(VolumeFiles, WhatLiesBesideTheDataFileStays) {
  std::filesystem::create_directories(folder_.path() / "drive");
  std::ofstream(folder_.path() / "drive" / "notes.txt") << "mine";
  auto volume = create(options());
  // Somebody put another file under the name: it is not ours to remove.
  std::filesystem::rename(file(), folder_.path() / "moved");
  std::ofstream(file()) << "a stranger's";
  volume->remove_files();
  volume.reset();
  EXPECT_TRUE(std::filesystem::exists(file()));
  EXPECT_TRUE(std::filesystem::exists(folder_.path() / "drive" / "notes.txt"));
}

TEST_F(VolumeFiles, MemoryIsRegisteredInPiecesAndSaidToBe) {
  VolumeOptions wanted = options();
  wanted.engine = EngineKind::io_uring;
  auto volume = create(wanted);
  ASSERT_TRUE(volume);
  EXPECT_TRUE(volume->mode().registered_files);
  EXPECT_FALSE(volume->mode().registered_buffers);
  Buffer first = allocate_buffer(kMiB), second = allocate_buffer(kMiB);
  volume->register_memory(std::span<std::byte>{});
  EXPECT_FALSE(volume->mode().registered_buffers);
  volume->register_memory(first.bytes());
  volume->register_memory(second.bytes());
  EXPECT_TRUE(volume->mode().registered_buffers);
  for (Buffer* slab : {&first, &second}) {
    fill(slab->bytes(), 0, 5);
    EXPECT_FALSE(transfer(*volume, Op::write, 0, kMiB, Buffer(slab->data(), kMiB, nullptr, nullptr)).error);
    EXPECT_TRUE(read_holds(*volume, 0, kMiB, 5));
  }
  volume.reset();
}

TEST(VolumeOptionsTest, NonsenseIsAUsageError) {
  testing::TempDir folder;
  std::string said;
  const auto kind = [&](VolumeOptions options) {
    Result<std::unique_ptr<Volume>> volume = Volume::create(options);
    said = volume ? "" : volume.error().message();
    return volume ? ErrorKind::none : volume.error().kind;
  };
  VolumeOptions good = options_in(folder, kMiB);
  VolumeOptions bad = good;
  bad.folders.clear();
  EXPECT_EQ(kind(bad), ErrorKind::usage);
  for (const std::uint64_t bytes : {std::uint64_t{0}, (std::uint64_t{1} << 60) + 1}) {
    bad = good;
    bad.bytes = bytes;
    EXPECT_EQ(kind(bad), ErrorKind::usage) << bytes;
  }
  bad = good;
  bad.bytes = std::uint64_t{1} << 60;  // absurd enough for the drive
  EXPECT_EQ(kind(bad), ErrorKind::environment);
  bad = good;
  bad.folders = {"/proc/nowhere/drive"};
  EXPECT_EQ(kind(bad), ErrorKind::environment);
  EXPECT_THAT(said, HasSubstr("/proc/nowhere"));
  bad = good;
  bad.folders.assign(65, folder.path() / "many");
  EXPECT_EQ(kind(bad), ErrorKind::usage);
  for (const std::size_t block :
       {std::size_t{0}, std::size_t{2048}, std::size_t{5000}, (std::size_t{1} << 30) + 4096}) {
    bad = good;
    bad.block = block;
    EXPECT_EQ(kind(bad), ErrorKind::usage) << block;
    EXPECT_THAT(said, HasSubstr("a multiple of 4096"));
  }
  for (const unsigned depth : {0U, 4097U}) {
    bad = good;
    bad.depth = depth;
    EXPECT_EQ(kind(bad), ErrorKind::usage) << depth;
    EXPECT_THAT(said, HasSubstr("from 1 to 4096"));
  }
  for (const char* name : {"../state", "", "a/b"}) {
    bad = good;
    bad.name = name;
    EXPECT_EQ(kind(bad), ErrorKind::usage) << name;
    EXPECT_THAT(said, HasSubstr("plain file name"));
  }
  for (const std::vector<double>& speeds : std::vector<std::vector<double>>{{1.0, 2.0}, {0.0}, {-1.0}, {1e31}}) {
    bad = good;
    bad.speeds = speeds;
    EXPECT_EQ(kind(bad), ErrorKind::usage);
  }
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "drive"));  // nothing was made for any of them
  good.block = 4096;
  good.depth = 1;
  good.speeds = {1e30};
  EXPECT_EQ(kind(good), ErrorKind::none);
}

}  // namespace
}  // namespace tierflow::io

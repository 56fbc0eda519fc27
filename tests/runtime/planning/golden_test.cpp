// The bytes of the files that lie beside a state, as golden/*.txt in this folder has them: what this version writes
// must equal them, and they must open.
#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>

#include "io/volume.h"
#include "runtime/planning/left_store.h"
#include "runtime/planning/reference_file.h"
#include "tests/runtime/expect.h"
#include "tests/support/system_calls.h"
#include "tests/support/temp_dir.h"

namespace tierflow::testing {
namespace {

const std::string kIdentity = R"({"loss":"dpo","seed":7})";
const std::vector<double> kReference{-1.5, 0, -0x1.123456789abcdp-3};

std::string hex(const std::filesystem::path& path) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::ifstream in(path, std::ios::binary);
  std::string text;
  for (char c; in.get(c);) {
    text += kDigits[static_cast<unsigned char>(c) >> 4];
    text += kDigits[static_cast<unsigned char>(c) & 15];
  }
  return text;
}

struct FilesBesideAState : ::testing::Test {
  static std::filesystem::path golden_file() { return std::filesystem::path(TIERFLOW_GOLDEN) / "beside-state.txt"; }
  void SetUp() override {
    std::ifstream in(golden_file());
    for (std::string name, text; in >> name >> text;) golden_[name] = text;
  }
  // Writes the golden file of this name there.
  std::filesystem::path golden(const std::string& name) {
    const std::filesystem::path path = folder_.path() / name;
    std::ofstream out(path, std::ios::binary);
    for (std::size_t i = 0; i + 1 < golden_[name].size(); i += 2)
      out.put(static_cast<char>(std::stoi(golden_[name].substr(i, 2), nullptr, 16)));
    return path;
  }

  TempDir folder_, written_;
  std::map<std::string, std::string> golden_;
};

TEST_F(FilesBesideAState, ArePinned) {
  const Folders storage{written_.path()};
  std::map<std::string, std::string> written;
  write_reference(reference_beside(storage), kIdentity, kReference);
  written["checksum"] = keep_beside(storage, 4, "what a client keeps");
  keep_beside(storage, 5, "what it keeps next");
  for (const auto& entry : std::filesystem::directory_iterator(written_.path()))
    written[entry.path().filename().string()] = hex(entry.path());
  if (std::getenv("TIERFLOW_WRITE_GOLDEN") != nullptr) {
    std::ofstream out(golden_file());
    for (const auto& [name, text] : written) out << name << ' ' << text << '\n';
  }
  EXPECT_EQ(golden_.size(), 4U);
  EXPECT_EQ(written, golden_);
}

// What a client keeps there is as much its user's own as the state is.
TEST_F(FilesBesideAState, AreOfTheirUserAlone) {
  const mode_t before = umask(0);
  const std::string checksum = keep_beside({written_.path()}, 4, "what a client keeps");
  bring_beside({written_.path()}, {folder_.path()}, 4, checksum);
  umask(before);
  for (const TempDir* folder : {&written_, &folder_})
    EXPECT_EQ(std::filesystem::status(folder->path() / "state.tfv.beside.A").permissions(),
              std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
}

// The commit that names it comes next.
TEST_F(FilesBesideAState, HaveADurableName) {
  const SystemCalls calls;
  keep_beside({written_.path()}, 4, "what a client keeps");
  EXPECT_EQ(calls.seen().back().name, "fsync");
  EXPECT_EQ(calls.seen().back().path, written_.path().string());
}

TEST_F(FilesBesideAState, StandOnceThoughTheFoldersChangeTheirOrder) {
  keep_beside({written_.path(), folder_.path()}, 4, "what a client keeps");
  const std::string checksum = keep_beside({folder_.path(), written_.path()}, 4, "what it keeps now");
  EXPECT_TRUE(std::filesystem::is_empty(written_.path()));
  EXPECT_EQ(read_beside({written_.path(), folder_.path()}, 4, checksum), "what it keeps now");
}

TEST_F(FilesBesideAState, GoWithIt) {
  const Folders storage{written_.path(), folder_.path()};
  const auto filled = [&] {
    leave_note(storage, true);
    for (const std::uint64_t generation : {4, 5}) keep_beside(storage, generation, "what a client keeps");
    for (const std::filesystem::path& folder : storage) {
      write_reference(folder / "state.tfv.reference", kIdentity, kReference);
      for (const char* killed : {"state.tfv.beside.A.partial", "state.tfv.beside.B.partial"})
        write_file(folder / killed, "");
    }
  };
  filled();
  // A run that was killed while it moved the state.
  ASSERT_TRUE(io::Volume::create({.folders = storage,
                                  .name = kMovingStore,
                                  .bytes = 4096,
                                  .allow_buffered = true,
                                  .allow_any_filesystem = true})
                  .ok());
  discard_store(storage);
  for (const std::filesystem::path& folder : storage) EXPECT_TRUE(std::filesystem::is_empty(folder)) << folder;
}

TEST_F(FilesBesideAState, AReferenceThatIsCutOrOfOthersIsRefused) {
  const std::filesystem::path path = golden("state.tfv.reference");
  for (const std::int64_t sequences : {2, 4})
    expect_refusal(io::ErrorKind::corruption, {"is of another run"},
                   [&] { read_reference(path, kIdentity, sequences); });
  for (std::uintmax_t bytes = std::filesystem::file_size(path); bytes-- > 0;) {
    std::filesystem::resize_file(path, bytes);
    expect_refusal(io::ErrorKind::corruption, {"state.tfv.reference", "is damaged"},
                   [&] { read_reference(path, kIdentity, 3); });
  }
}

TEST_F(FilesBesideAState, Open) {
  EXPECT_EQ(read_reference(golden("state.tfv.reference"), kIdentity, 3), kReference);
  for (const char* name : {"state.tfv.beside.A", "state.tfv.beside.B"}) golden(name);
  EXPECT_EQ(read_beside({folder_.path()}, 4, golden_["checksum"]), "what a client keeps");
  EXPECT_FALSE(check_beside({folder_.path()}, 4, R"({"step":3,"beside":")" + golden_["checksum"] + R"("})"));
  EXPECT_TRUE(check_beside({folder_.path()}, 5, R"({"step":3,"beside":")" + golden_["checksum"] + R"("})"));
}

}  // namespace
}  // namespace tierflow::testing

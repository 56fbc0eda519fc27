#pragma once
// A fresh folder on the drive under test, removed with everything in it at the end of the scope. TIERFLOW_TEST_DIR
// chooses where; or in a folder that a test names.
#include <stdlib.h>

#include <cstdlib>
#include <filesystem>
#include <string>

namespace tierflow::testing {

class TempDir {
 public:
  TempDir() : TempDir(drive_under_test()) {}
  explicit TempDir(const std::filesystem::path& base) {
    std::string pattern = (base / "tierflow-XXXXXX").string();
    path_ = mkdtemp(pattern.data());
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  const std::filesystem::path& path() const { return path_; }

 private:
  static std::filesystem::path drive_under_test() {
    const char* base = std::getenv("TIERFLOW_TEST_DIR");
    return base != nullptr ? std::filesystem::path(base) : std::filesystem::temp_directory_path();
  }

  std::filesystem::path path_;
};

}  // namespace tierflow::testing

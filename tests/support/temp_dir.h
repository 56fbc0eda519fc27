#pragma once
// A fresh folder on the drive under test, removed with everything in it at the end of the scope. TIERFLOW_TEST_DIR
// chooses where.
#include <stdlib.h>

#include <cstdlib>
#include <filesystem>
#include <string>

namespace tierflow::testing {

class TempDir {
 public:
  TempDir() {
    const char* base = std::getenv("TIERFLOW_TEST_DIR");
    std::string pattern =
        (base != nullptr ? std::string(base) : std::filesystem::temp_directory_path().string()) + "/tierflow-XXXXXX";
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
  std::filesystem::path path_;
};

}  // namespace tierflow::testing

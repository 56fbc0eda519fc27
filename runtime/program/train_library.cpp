#include "runtime/program/train_library.h"

#include <fmt/format.h>

#include "runtime/base/exception.h"

namespace tierflow {

namespace fs = std::filesystem;

fs::path train_library() {
  std::error_code ignored;
  const fs::path here = fs::read_symlink("/proc/self/exe", ignored).parent_path();
  const char* name = "libtierflow_train.so";
  for (const fs::path& path :
       {here / name, here.parent_path() / "lib" / name, here.parent_path() / "lib" / "x86_64-linux-gnu" / name})
    if (fs::exists(path, ignored)) return path;
  fail(io::ErrorKind::environment, (here / name).string(),
       "is missing: this build has no LibTorch, without which nothing can be trained, evaluated or measured");
}

std::string train_build() {
  std::error_code error;
  const fs::path path = train_library();
  const auto size = fs::file_size(path, error);
  return fmt::format("{}-{}", size, fs::last_write_time(path, error).time_since_epoch().count());
}

}  // namespace tierflow

#include "io/discard.h"

#include <cerrno>
#include <vector>

#include "io/file.h"
#include "io/filesystem.h"

namespace tierflow::io {

Error discard(const VolumeOptions& options) {
  std::vector<File> files;
  for (const std::filesystem::path& directory : options.folders) {
    Result<File> file =
        File::open(directory / (options.name + ".tfv"), {.allow_buffered = true, .allow_any_filesystem = true});
    if (file)
      files.push_back(std::move(file).value());
    else if (file.error().error_number != ENOENT)
      return file.error();
  }
  for (const File& file : files) {
    file.remove();
    if (Error error = sync_directory(std::filesystem::path(file.path()).parent_path())) return error;
  }
  return {};
}

}  // namespace tierflow::io

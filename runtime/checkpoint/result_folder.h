#pragma once
// The folder that a command writes a model to. It is claimed before the work begins and filled at the end.
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "runtime/base/files.h"

namespace tierflow {

class ResultFolder {
 public:
  // Makes the folder and those above it, tries to write in it, and locks it: another process that wants it is refused
  // (kind locked). Throws Exception (kind usage) if it holds anything but the unfinished result of a run that died,
  // which is removed. with_checkpoints: it may also hold folders named checkpoint-N, which are left as they are. logs:
  // files that the run writes to itself, wherever they lie; of those in the folder, what an earlier process wrote, also
  // under "NAME.N", is left as it is.
  explicit ResultFolder(std::filesystem::path path, bool with_checkpoints = false,
                        const std::vector<std::filesystem::path>& logs = {});
  // Unless finish() ran, what a result consists of is removed, and then what the constructor made.
  ~ResultFolder();
  ResultFolder(const ResultFolder&) = delete;
  ResultFolder& operator=(const ResultFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  // Throws Exception (kind environment) if the drive has less room.
  void check_space(std::uint64_t bytes) const;
  // Durably marks the folder as one with an unfinished result, until the result's last file is there (config.json or
  // adapter_config.json); before the first file.
  void begin(const std::string& last = "config.json") const;
  // Call it when the result is whole and flushed: it stays.
  void finish() { finished_ = true; }
  // Takes finish() back: the result is removed with this object.
  void withdraw() { finished_ = false; }

 private:
  void claim();
  void try_to_write() const;

  const std::filesystem::path path_;
  BorrowedFolder made_;
  File held_;
  bool finished_ = false;
};

// The folders FOLDER/checkpoint-N: models that a run writes before its end. Each is whole and flushed before it has its
// name. If a step is done again, its folder is replaced.
class Checkpoints {
 public:
  explicit Checkpoints(std::filesystem::path folder) : folder_(std::move(folder)) {}
  // `fill` begins the folder that it is given and writes the model there. Returns the folder's final name.
  std::filesystem::path write(std::int64_t step, const std::function<void(const ResultFolder&)>& fill) const;
  bool has(std::int64_t step) const;
  // The folder of the last step that has `last_file` and so is whole; nothing if there is none.
  std::optional<std::filesystem::path> newest(const char* last_file) const;
  // Removes the files of a result in one such folder, if it exists. Other files stay, and then so does the folder.
  void remove(std::int64_t step) const;
  // Removes all but the last `count`, and the one of step `besides`, which does not count; 0: none.
  void keep_last(std::int64_t count, std::int64_t besides) const;

 private:
  std::vector<std::int64_t> steps() const;  // ascending
  std::filesystem::path folder_of(std::int64_t step) const;
  const std::filesystem::path folder_;
};

// The files of a model folder that training does not change: the tokenizer's, and the model's own code, which is never
// run. They are opened when the run begins, by the rules of open_beneath(), so that a missing permission or a link out
// of the folder is found early.
class CompanionFiles {
 public:
  // chat_templates: a file, or a folder with chat_template.jinja, that takes the place of all chat templates; empty:
  // they are those of `folder`.
  explicit CompanionFiles(std::filesystem::path folder, const std::filesystem::path& chat_templates = {});
  std::uint64_t bytes() const;
  // Writes each file; it is flushed before it has its name.
  void copy_to(const std::filesystem::path& folder) const;

 private:
  struct Companion {
    std::filesystem::path name;  // in the folder, or in one of its folders
    File file;
    std::filesystem::path from;
  };
  const std::filesystem::path folder_;
  std::vector<Companion> files_;
};

}  // namespace tierflow

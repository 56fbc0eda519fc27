#include "runtime/checkpoint/result_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <set>
#include <system_error>

#include "io/lock_holder.h"
#include "runtime/base/exception.h"
#include "runtime/checkpoint/safetensors.h"

namespace tierflow {
namespace {

namespace fs = std::filesystem;

constexpr std::array companions = {"tokenizer.json",
                                   "tokenizer_config.json",
                                   "special_tokens_map.json",
                                   "added_tokens.json",
                                   "vocab.json",
                                   "merges.txt",
                                   "tokenizer.model",
                                   "chat_template.jinja",
                                   "chat_template.json",
                                   "generation_config.json",
                                   "preprocessor_config.json",
                                   "processor_config.json",
                                   "video_preprocessor_config.json",
                                   "tekken.json"};
// A folder of further chat templates, as transformers saves those of a tokenizer that has several.
constexpr const char* more_templates = "additional_chat_templates";
constexpr std::string_view partial = ".partial";
// The last file of a result, of a model or of adapters. There under its partial name from begin() on.
constexpr std::array last_files = {"config.json", "adapter_config.json"};
// As long as the longest name that a result may have in it.
constexpr const char* longest_name = "model-00001-of-00001.safetensors.partial";

bool is_last(std::string_view name) {
  return std::find(last_files.begin(), last_files.end(), name) != last_files.end();
}

// The names that transformers gives to a model's own code (auto_map in config.json).
bool is_code(std::string_view name) {
  constexpr std::array kinds = {"configuration_", "modeling_", "tokenization_", "processing_", "image_processing_"};
  return name.ends_with(".py") && std::ranges::any_of(kinds, [&](const char* kind) { return name.starts_with(kind); });
}

bool is_result_name(const std::string& name) {
  return is_last(name) || is_code(name) || name == more_templates || name == "tierflow_run.json" ||
         name == "adapter_model.safetensors" || is_weights_name(name) ||
         std::find(companions.begin(), companions.end(), name) != companions.end();
}

[[noreturn]] void refuse_content(const fs::path& path) {
  fail(io::ErrorKind::usage, path.string(), "--out exists and is not an empty folder: name another, or remove it");
}

fs::path checked(fs::path path) {
  std::error_code ignored;
  if (fs::exists(path, ignored) && !fs::is_directory(path, ignored)) refuse_content(path);
  return path;
}

// N of checkpoint-N; -1 of other names.
std::int64_t checkpoint_step(std::string_view name) {
  constexpr std::string_view prefix = "checkpoint-";
  std::int64_t step = -1;
  if (!name.starts_with(prefix)) return -1;
  const auto [end, error] = std::from_chars(name.data() + prefix.size(), name.data() + name.size(), step);
  return error == std::errc() && end == name.data() + name.size() && step >= 0 ? step : -1;
}

struct ResultFiles {
  std::vector<fs::path> unfinished, finished;  // with `partial` behind the name, and without; marks are the last
  std::vector<fs::path> checkpoints;           // folders, unfinished ones too
  bool marked = false, whole = false;          // begun; with the last file
  bool others = false;

  void remove() const {
    for (const auto* files : {&finished, &unfinished})
      for (const fs::path& file : *files)
        if (unlink(file.c_str()) != 0 && (errno == EISDIR || errno == EPERM) && file.filename() == more_templates)
          remove_templates(file);
  }

 private:
  static void remove_templates(const fs::path& folder) {
    std::error_code ignored;
    std::vector<fs::path> files;
    for (fs::directory_iterator entry(folder, ignored), end; !ignored && entry != end; entry.increment(ignored))
      files.push_back(entry->path());
    for (const fs::path& file : files)
      if (file.extension() == ".jinja" || file.extension() == partial) unlink(file.c_str());
    rmdir(folder.c_str());
  }
};

// "NAME", or "NAME.N" as an earlier log is kept.
bool is_log(std::string_view name, const std::vector<std::string>& logs) {
  return std::ranges::any_of(logs, [&](const std::string& log) {
    if (!name.starts_with(log)) return false;
    const std::string_view rest = name.substr(log.size());
    return rest.empty() || (rest.size() > 1 && rest.front() == '.' &&
                            rest.find_first_not_of("0123456789", 1) == std::string_view::npos);
  });
}

// Of these files, the names of those that lie in the folder.
std::vector<std::string> names_in(const fs::path& folder, const std::vector<fs::path>& files) {
  std::vector<std::string> names;
  for (const fs::path& file : files) {
    std::error_code absent;
    const fs::path parent = file.has_parent_path() ? file.parent_path() : fs::path(".");
    if (!file.filename().empty() && fs::equivalent(parent, folder, absent)) names.push_back(file.filename().string());
  }
  return names;
}

ResultFiles result_files(const fs::path& folder, const std::vector<std::string>& logs = {}) {
  ResultFiles found;
  std::vector<fs::path> marks;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    std::error_code ignored;
    const bool unfinished = name.ends_with(partial);
    const std::string_view plain = std::string_view(name).substr(0, name.size() - (unfinished ? partial.size() : 0));
    if (unfinished && is_last(plain))
      marks.push_back(entry->path());
    else if (checkpoint_step(plain) >= 0 && entry->is_directory(ignored) && !entry->is_symlink(ignored))
      found.checkpoints.push_back(entry->path());
    else if (unfinished && is_result_name(std::string(plain)))
      found.unfinished.push_back(entry->path());
    else if (is_result_name(name))
      found.finished.push_back(entry->path());
    else if (!is_log(name, logs))
      found.others = true;
    found.whole = found.whole || is_last(name);
  }
  if (error) fail_system("read folder", folder.string(), error.value());
  found.marked = !marks.empty();
  found.unfinished.insert(found.unfinished.end(), marks.begin(), marks.end());
  return found;
}

// The last file first: what is left of it is no model.
void remove_checkpoint(const fs::path& folder) {
  for (const char* last : last_files) unlink((folder / last).c_str());
  result_files(folder).remove();
  rmdir(folder.c_str());
}

}  // namespace

ResultFolder::ResultFolder(fs::path path, bool with_checkpoints, const std::vector<fs::path>& logs)
    : path_(checked(std::move(path))), made_(path_) {
  claim();
  const ResultFiles there = result_files(path_, names_in(path_, logs));
  if (there.others || (!with_checkpoints && !there.checkpoints.empty()) || there.whole ||
      (!there.finished.empty() && !there.marked))
    refuse_content(path_);
  there.remove();
  try_to_write();
}

void ResultFolder::begin(const std::string& last) const {
  const fs::path path = path_ / (last + std::string(partial));
  const File file(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0644));
  if (!file) fail_system("create", path.string(), errno);
  if (fsync(file.fd()) != 0) fail_system("flush", path.string(), errno);
  sync_folder(path_);
}

ResultFolder::~ResultFolder() {
  if (finished_) return;
  try {
    result_files(path_).remove();
  } catch (const Exception&) {  // a folder that cannot be read any more keeps what it has
  }
}

void ResultFolder::claim() {
  held_ = File(open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!held_) fail_system("open", path_.string(), errno, "--out must be a folder that can be read and written");
  const auto locked = [&](const std::string& who) {
    fail(io::ErrorKind::locked, path_.string(), who + ": name another folder as --out");
  };
  if (flock(held_.fd(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    const pid_t holder = io::lock_holder(held_.fd()).process;
    locked(holder > 0 ? fmt::format("process {} writes its result there", holder)
                      : "another process writes its result there");
  }
  // A file system that cannot lock folders leaves the run unguarded, no worse. One that was removed meanwhile is not
  // ours.
  struct stat held {
  }, named{};
  if (fstat(held_.fd(), &held) != 0 || stat(path_.c_str(), &named) != 0 || held.st_ino != named.st_ino ||
      held.st_dev != named.st_dev)
    locked("another process removed it just now");
}

fs::path Checkpoints::write(std::int64_t step, const std::function<void(const ResultFolder&)>& fill) const {
  const fs::path final = folder_of(step), work = final.string() + std::string(partial);
  // What a killed process left there may lack its name alone.
  std::error_code ignored;
  if (fs::is_directory(work, ignored)) remove_checkpoint(work);
  {
    ResultFolder unfinished(work);
    fill(unfinished);
    unfinished.finish();
  }
  if (fs::exists(final, ignored)) remove_checkpoint(final);
  if (rename(work.c_str(), final.c_str()) != 0)
    fail_system("rename", final.string(), errno, "it holds files of somebody else; remove it");
  sync_folder(folder_);
  return final;
}

bool Checkpoints::has(std::int64_t step) const {
  std::error_code ignored;
  return step > 0 && fs::is_directory(folder_of(step), ignored);
}

std::vector<std::int64_t> Checkpoints::steps() const {
  std::vector<std::int64_t> steps;
  for (const fs::path& path : result_files(folder_).checkpoints)
    if (const std::int64_t step = checkpoint_step(path.filename().native()); step >= 0) steps.push_back(step);
  std::sort(steps.begin(), steps.end());
  return steps;
}

std::optional<fs::path> Checkpoints::newest(const char* last_file) const {
  const std::vector<std::int64_t> all = steps();
  std::error_code ignored;
  for (auto step = all.rbegin(); step != all.rend(); ++step)
    if (fs::exists(folder_of(*step) / last_file, ignored)) return folder_of(*step);
  return std::nullopt;
}

void Checkpoints::remove(std::int64_t step) const {
  if (has(step)) remove_checkpoint(folder_of(step));
}

void Checkpoints::keep_last(std::int64_t count, std::int64_t besides) const {
  std::vector<std::int64_t> steps = this->steps();
  std::erase(steps, besides);
  for (std::size_t i = 0; i + static_cast<std::size_t>(count) < steps.size(); ++i) remove(steps[i]);
}

fs::path Checkpoints::folder_of(std::int64_t step) const {
  return folder_ / fmt::format("checkpoint-{}", step);
}

// What cannot be written is to be known before the work: no right, a drive that is read-only or full, a path too long.
void ResultFolder::try_to_write() const {
  const fs::path probe = path_ / longest_name;
  const auto refuse = [&](const char* operation, int error_number) {
    unlink(probe.c_str());
    fail_system(operation, probe.string(), error_number,
                error_number == ENOSPC || error_number == EDQUOT
                    ? "make room there, or name a folder on another drive as --out"
                    : "--out must be a folder that can be written");
  };
  const File file(open(probe.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0644));
  if (!file) refuse("create", errno);
  const std::array<std::byte, 4096> zeros{};
  if (const io::Moved moved = io::write_all(file.fd(), {}, zeros); moved.bytes != zeros.size())
    refuse("write", moved.error_number);
  if (fsync(file.fd()) != 0) refuse("flush", errno);
  unlink(probe.c_str());
}

void ResultFolder::check_space(std::uint64_t bytes) const {
  const std::uint64_t free = free_space(path_);
  if (free < bytes)
    fail(io::ErrorKind::environment, path_.string(),
         fmt::format("has {:.1f} MiB free, but the result takes {:.1f} MiB: free some space or give another --out",
                     static_cast<double>(free) / 0x1p20, static_cast<double>(bytes) / 0x1p20));
}

CompanionFiles::CompanionFiles(fs::path folder, const fs::path& chat_templates)
    : folder_(folder.empty() ? "." : std::move(folder)) {
  std::error_code ignored;
  const bool one = fs::is_regular_file(chat_templates, ignored), own = chat_templates.empty();
  const fs::path templates = own ? folder_ : chat_templates;
  const auto add = [&](const fs::path& from, const fs::path& within, const std::string& name) {
    if (fs::symlink_status(from / within / name, ignored).type() != fs::file_type::not_found)
      files_.push_back({within / name, open_beneath(from / within, name), from / within / name});
  };
  std::set<std::string> names(companions.begin(), companions.end());
  for (fs::directory_iterator entry(folder_, ignored), end; !ignored && entry != end; entry.increment(ignored))
    if (std::string name = entry->path().filename().string(); is_code(name)) names.insert(std::move(name));
  for (const std::string& name : names)
    if (own || !name.starts_with("chat_template.")) add(folder_, "", name);
  if (one) files_.push_back({"chat_template.jinja", open_regular(templates), templates});
  if (one) return;
  if (!own) add(templates, "", "chat_template.jinja");
  for (fs::directory_iterator entry(templates / more_templates, ignored), end; !ignored && entry != end;
       entry.increment(ignored))
    if (entry->path().extension() == ".jinja") add(templates, more_templates, entry->path().filename().string());
}

std::uint64_t CompanionFiles::bytes() const {
  std::uint64_t sum = 0;
  for (const Companion& each : files_) sum += file_size(each.file, each.from);
  return sum;
}

void CompanionFiles::copy_to(const fs::path& folder) const {
  for (const Companion& each : files_) {
    if (each.name.has_parent_path()) {
      make_folder((folder / each.name).parent_path());
      sync_folder(folder);
    }
    write_copy(folder / each.name, each.file, each.from);
  }
}

}  // namespace tierflow

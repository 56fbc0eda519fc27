#include "runtime/planning/moved_store.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "io/discard.h"
#include "io/wait.h"
#include "runtime/base/exception.h"
#include "runtime/base/files.h"
#include "runtime/base/machine.h"
#include "runtime/planning/cut_extents.h"
#include "runtime/planning/session_plan.h"
#include "runtime/planning/stored_model.h"

namespace tierflow {
namespace {

namespace fs = std::filesystem;

io::VolumeOptions named(io::VolumeOptions storage, const std::string& name) {
  storage.name = name;
  return storage;
}

// By folder, those that have a file of the volume with this name.
std::map<fs::path, io::Membership> parts_in(const Folders& folders, const std::string& name) {
  std::map<fs::path, io::Membership> parts;
  for (const fs::path& folder : folders)
    if (const auto part = value_or_throw(io::membership({.name = name}, folder))) parts.emplace(folder, *part);
  return parts;
}

bool of_one_volume(const std::map<fs::path, io::Membership>& parts) {
  return std::ranges::all_of(parts, [&](const auto& part) { return part.second == parts.begin()->second; });
}

// What a copy is committed as before anything is in it.
constexpr const char* kNothingYet = "{}";

// Whether a generation with something in it can be read there.
bool holds_state(const Folders& folders, const std::string& name) {
  auto contents =
      swap::Store::inspect({.folders = folders, .name = name, .allow_buffered = true, .allow_any_filesystem = true});
  if (!contents.ok() && contents.error().kind == io::ErrorKind::locked) throw Exception(contents.error());
  return contents.ok() && contents->generation != 0 && contents->progress != kNothingYet;
}

// Whether the first store is whole, in these folders or elsewhere. The second is then a copy of it, and no more.
bool first_is_whole(const Folders& storage) {
  const auto here = parts_in(storage, io::VolumeOptions{}.name);
  const bool is_here = !here.empty() && of_one_volume(here) && here.size() == storage.size() &&
                       here.begin()->second.count == here.size();
  const Folders lies = is_here ? storage : store_elsewhere(storage);
  return !lies.empty() && holds_state(lies, io::VolumeOptions{}.name);
}

bool second_is_there(const Folders& storage) {
  return std::ranges::any_of(storage, [](const fs::path& folder) {
    std::error_code ignored;
    return fs::exists(fs::symlink_status(folder / (std::string(kMovingStore) + ".tfv"), ignored));
  });
}

// Held by whoever moves a store from or into the folders; another process is refused (kind locked). A file system that
// cannot lock folders is taken as it is.
class MovesAlone {
 public:
  explicit MovesAlone(const Folders& folders) {
    std::set<fs::path> each;
    for (const fs::path& folder : folders) {
      std::error_code absent;
      if (const fs::path real = fs::canonical(folder, absent); !absent) each.insert(real);
    }
    for (const fs::path& folder : each) {
      File opened(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
      if (!opened) continue;
      held_.push_back(std::move(opened));
      if (flock(held_.back().fd(), LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) continue;
      release();
      fail(io::ErrorKind::locked, folder.string(), "another process moves the state of these folders: wait for it");
    }
  }
  MovesAlone(const MovesAlone&) = delete;
  MovesAlone& operator=(const MovesAlone&) = delete;
  ~MovesAlone() { release(); }

 private:
  void release() {
    for (const File& folder : held_) flock(folder.fd(), LOCK_UN);  // a child that was forked meanwhile holds it too
    held_.clear();
  }
  std::vector<File> held_;
};

// Whether the second store counts: its files are taking the first one's place, or can. If not, it is a copy that
// nobody needs. Throws where it may be all that there is, and cannot be told.
bool counts(const io::VolumeOptions& storage) {
  const io::VolumeOptions second = named(storage, kMovingStore);
  auto parts = parts_in(storage.folders, second.name);
  const std::size_t waiting = parts.size();
  if (!parts.empty()) {
    const io::Membership volume = parts.begin()->second;
    for (const auto& [folder, part] : parts_in(storage.folders, storage.name))
      if (part == volume) parts.emplace(folder, part);
    const bool whole = of_one_volume(parts) && parts.size() == volume.count && parts.size() == storage.folders.size();
    if (whole && waiting < parts.size()) return true;
    if (first_is_whole(storage.folders)) return false;
    if (!whole)
      fail(io::ErrorKind::usage, storage.folders.front().string(),
           fmt::format(
               "the state was being moved to {} folders, and this was interrupted: name the same folders as then",
               volume.count));
  } else if (first_is_whole(storage.folders)) {
    return false;
  }
  io::Result<bool> interrupted = io::creation_was_interrupted(second);
  if (interrupted.ok() && *interrupted) return false;
  const swap::Store::Contents contents = value_or_throw(swap::Store::inspect(second));
  if (contents.generation == 0 || contents.progress == kNothingYet)
    fail(io::ErrorKind::usage, storage.folders.front().string(),
         fmt::format("a move of the state was interrupted, and the state that it copied is not whole here: name its "
                     "folders; if it is gone, remove {}.tfv in each folder",
                     kMovingStore));
  return true;
}

// The second store takes the place of the first, which lies in the folders `first`. Each step can be done again. held:
// as that of discard_store().
void take_place(const io::VolumeOptions& storage, const Folders& first, bool held) {
  const auto waiting = parts_in(storage.folders, kMovingStore);
  if (waiting.empty())
    fail(io::ErrorKind::corruption, storage.folders.front().string(), "the copy of the state cannot be read any more");
  const io::Membership second = waiting.begin()->second;
  const auto parts = parts_in(storage.folders, storage.name);
  const auto old = std::ranges::find_if(parts, [&](const auto& part) { return part.second != second; });
  for (const fs::path& folder : first) {
    const bool stays = names_folder(storage.folders, folder);
    // A note may be old, and the folder another run's by now.
    const auto part = parts_in({folder}, storage.name);
    if (!stays && old != parts.end() && !part.empty() && part.begin()->second == old->second)
      discard_store({folder}, held);
  }
  // Where it lies from here on: of a part of it alone, this says where the others are.
  leave_note(storage.folders, true);
  for (const fs::path& folder : storage.folders) sync_folder(folder);
  for (const fs::path& folder : storage.folders) {
    const fs::path from = folder / (std::string(kMovingStore) + ".tfv"), to = folder / (storage.name + ".tfv");
    std::error_code error;
    if (!fs::exists(from, error)) continue;
    fs::rename(from, to, error);
    if (error) fail_system("rename", from.string(), error.value());
    sync_folder(folder);
  }
}

// What was committed last is to be moved: a drive that cannot be read hides it.
void expect_newest(const StoredModel& from) {
  if (from.contents.unreadable) throw Exception(from.contents.unreadable);
}

// layout: the copy's, whose chunks may have another size. phase: what `progress` hears.
void copy(const StoredModel& from, const Folders& first, const io::VolumeOptions& storage, const swap::Layout& layout,
          const char* phase, const Progress& progress) {
  io::VolumeOptions volume = named(storage, kMovingStore);
  volume.measure_speeds = volume.folders.size() > 1;
  auto to = value_or_throw(swap::Store::create({.volume = std::move(volume),
                                                .generations = from.contents.generations,
                                                .scratch = {.gradients = false},
                                                .identity = from.contents.identity},
                                               layout));
  try {
    // What lies beside a generation goes by the letter of its number: one commit makes the copy count.
    if (from.store->generation() % 2 == 0) throw_if(to->commit(kNothingYet));
    CutExtents extents(from, layout);
    std::uint64_t done = 0;
    const std::uint64_t total = copied_bytes(layout);
    for (const auto kind : {swap::ExtentKind::hi, swap::ExtentKind::state})
      for (const swap::Chunk& chunk : layout.chunks()) {
        std::optional<io::Buffer> buffer = extents.extent(kind, chunk.id);
        if (!buffer) continue;
        to->stamp(kind, chunk.id, buffer->bytes().first(chunk.bytes(kind)));
        throw_if(io::wait_for([&](io::Callback answer) {
                   to->write(kind, chunk.id, *std::move(buffer), std::move(answer));
                 }).error);
        done += chunk.bytes(kind);
        if (progress) progress(phase, done, total);
      }
    const auto position = nlohmann::json::parse(from.store->progress(), nullptr, false);
    if (position.is_object() && position.contains("beside"))
      bring_beside(first, storage.folders, from.store->generation(), position["beside"].get<std::string>());
    bring_reference(first, storage.folders);
    throw_if(to->commit(from.store->progress()));
    // Soon it is all that there is.
    throw_if(to->verify_all([&](std::uint64_t read, std::uint64_t all) {
      if (progress) progress("verifying the copy", read, all);
    }));
  } catch (...) {
    to->remove_files();
    throw;
  }
}

}  // namespace

Folders store_elsewhere(const Folders& storage) {
  const auto here = parts_in(storage, io::VolumeOptions{}.name);
  if (here.empty() || !of_one_volume(here)) return {};
  const std::size_t count = here.begin()->second.count;
  if (here.size() == count && count == storage.size()) return {};
  Folders all;
  for (const auto& [folder, part] : here) all.push_back(folder);
  if (all.size() < count) {
    all = noted_folders(all);
    // A folder that the note does not name is a copy, and what the note names is not its to move.
    for (const auto& [folder, part] : here)
      if (!names_folder(all, folder)) return {};
  }
  const auto parts = parts_in(all, io::VolumeOptions{}.name);
  const bool whole = parts.size() == count && of_one_volume(parts) && parts.begin()->second == here.begin()->second;
  return whole ? all : Folders{};
}

Folders finish_move(const io::VolumeOptions& storage, const Say& say) {
  if (storage.folders.empty()) return {};
  if (second_is_there(storage.folders)) {
    const MovesAlone alone(storage.folders);
    if (counts(storage)) {
      say("the state was moved, and the end of that was interrupted: it is done now");
      // The first store may be in part or gone.
      take_place(storage, noted_folders(storage.folders), false);
    } else {
      throw_if(io::discard(named(storage, kMovingStore)));
    }
  }
  return store_elsewhere(storage.folders);
}

void move_store(const io::VolumeOptions& storage, const Folders& first, const Say& say, const Progress& progress) {
  Folders both = storage.folders;
  both.insert(both.end(), first.begin(), first.end());
  const MovesAlone alone(both);
  // Locked until the second store has its place: what another process added to the first would be lost with it.
  const StoredModel from = open_stored_model(first);
  expect_newest(from);
  if (const io::Error wrong = check_beside(first, from.store->generation(), from.store->progress()))
    fail_with_more(wrong, "name the folders where the state lies: a run goes back a generation there");
  std::string names;
  for (const fs::path& folder : first) names += (names.empty() ? "" : ", ") + folder.string();
  say(fmt::format("the state lies in {}: it is copied into the {} folders of this run, verified, and removed there",
                  names, storage.folders.size()));
  copy(from, first, storage, *from.layout, "moving the state", progress);
  take_place(storage, first, true);
}

std::uint64_t copied_bytes(const swap::Layout& layout) {
  std::uint64_t bytes = 0;
  for (const swap::Chunk& chunk : layout.chunks()) bytes += chunk.word_bytes() + chunk.state_bytes;
  return bytes;
}

void recut_store(const io::VolumeOptions& storage, std::uint64_t chunk_elements, const Say& say,
                 const Progress& progress) {
  finish_move(storage, say);
  const MovesAlone alone(storage.folders);
  const StoredModel from = open_stored_model(storage.folders);  // locked, as in move_store()
  expect_newest(from);
  if (from.store->generation() != from.contents.generation)
    throw Exception(
        io::Error{.kind = io::ErrorKind::corruption,
                  .path = storage.folders.front().string(),
                  .detail = fmt::format("generation {}, the newest, cannot be read: no other chunks are made "
                                        "of the one before it",
                                        from.contents.generation)});
  const swap::Layout layout(from.layout->units(), from.packed.stages, chunk_elements);
  throw_if(check_beside(storage.folders, from.store->generation(), from.store->progress()));
  const std::string where = storage.folders.front().string(), size = human_bytes(copied_bytes(layout));
  say(
      fmt::format("the state in {} has chunks for other budgets ({} elements, here {}): all of it, {}, is copied into "
                  "such chunks, verified, and takes the first one's place",
                  where, from.layout->chunk_elements(), chunk_elements, size));
  copy(from, storage.folders, storage, layout, "cutting the state anew", progress);
  take_place(storage, storage.folders, true);
}

bool can_resume(const SessionOptions& options, const Say& say) {
  const io::VolumeOptions storage = storage_volume(options);
  const Folders first = finish_move(storage, say);
  const LeftStore left = find_left_store(first.empty() ? options.storage : first);
  if (left.empty) discard_store(first.empty() ? options.storage : first);
  if (left.resumable && !first.empty()) {
    if (left.run != options.run)
      fail(io::ErrorKind::usage, first.front().string(),
           "the state there is another run's: it is not moved from there");
    move_store(storage, first, say, {});
  }
  return left.resumable;
}

}  // namespace tierflow

#include "runtime/planning/moved_store.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>

#include "io/discard.h"
#include "io/wait.h"
#include "runtime/base/exception.h"
#include "runtime/base/files.h"
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

// Whether the first store is whole, in these folders or elsewhere. The second is then a copy of it, and no more.
bool first_is_whole(const Folders& storage) {
  const auto here = parts_in(storage, io::VolumeOptions{}.name);
  const bool is_here = !here.empty() && of_one_volume(here) && here.size() == storage.size() &&
                       here.begin()->second.count == here.size();
  return is_here || !store_elsewhere(storage).empty();
}

// Whether the second store is whole and counts: its files are taking the first one's place, or can.
bool is_committed(const io::VolumeOptions& storage) {
  const io::VolumeOptions second = named(storage, kMovingStore);
  io::Result<bool> interrupted = io::creation_was_interrupted(second);
  auto parts = parts_in(storage.folders, second.name);
  if (parts.empty() || (interrupted.ok() && *interrupted)) return false;
  const io::Membership volume = parts.begin()->second;
  const std::size_t waiting = parts.size();
  for (const auto& [folder, part] : parts_in(storage.folders, storage.name))
    if (part == volume) parts.emplace(folder, part);
  if (!of_one_volume(parts) || parts.size() != volume.count || parts.size() != storage.folders.size()) {
    if (first_is_whole(storage.folders)) return false;
    fail(io::ErrorKind::usage, storage.folders.front().string(),
         fmt::format("the state was being moved to {} folders, and this was interrupted: name the same folders as then",
                     volume.count));
  }
  if (waiting < parts.size()) return true;
  auto contents = swap::Store::inspect(second);
  if (!contents.ok() && !first_is_whole(storage.folders)) throw Exception(contents.error());
  return contents.ok() && contents->generation != 0;
}

// The second store takes the place of the first, which lies in the folders `first`. Each step can be done again.
void take_place(const io::VolumeOptions& storage, const Folders& first) {
  const io::Membership second = parts_in(storage.folders, kMovingStore).begin()->second;
  const auto parts = parts_in(storage.folders, storage.name);
  const auto old = std::ranges::find_if(parts, [&](const auto& part) { return part.second != second; });
  for (const fs::path& folder : first) {
    const bool stays = std::ranges::any_of(storage.folders, [&](const fs::path& other) {
      std::error_code absent;
      return fs::equivalent(folder, other, absent);
    });
    // A note may be old, and the folder another run's by now.
    const auto part = parts_in({folder}, storage.name);
    if (!stays && old != parts.end() && !part.empty() && part.begin()->second == old->second) discard_store({folder});
  }
  for (const fs::path& folder : storage.folders) {
    const fs::path from = folder / (std::string(kMovingStore) + ".tfv"), to = folder / (storage.name + ".tfv");
    std::error_code error;
    if (!fs::exists(from, error)) continue;
    fs::rename(from, to, error);
    if (error) fail_system("rename", from.string(), error.value());
    sync_folder(folder);
  }
}

void copy(const StoredModel& from, const Folders& first, const io::VolumeOptions& storage, const Progress& progress) {
  io::VolumeOptions volume = named(storage, kMovingStore);
  volume.measure_speeds = volume.folders.size() > 1;
  auto to = value_or_throw(swap::Store::create({.volume = std::move(volume),
                                                .generations = from.contents.generations,
                                                .scratch = {.staged_gradients = false},
                                                .identity = from.contents.identity},
                                               *from.layout));
  try {
    std::vector<std::pair<swap::ExtentKind, int>> extents;
    std::uint64_t done = 0, total = 0;
    for (const auto kind : {swap::ExtentKind::hi, swap::ExtentKind::state})
      for (int chunk = 0; chunk < static_cast<int>(from.layout->chunks().size()); ++chunk)
        if (from.store->holds(kind, chunk)) {
          extents.emplace_back(kind, chunk);
          total += from.store->extent_bytes(kind, chunk);
        }
    for (const auto& [kind, chunk] : extents) {
      io::Buffer buffer = value_or_throw(from.store->fetch(kind, chunk));
      const std::uint64_t bytes = from.store->extent_bytes(kind, chunk);
      to->stamp(kind, chunk, buffer.bytes().first(bytes));
      throw_if(io::wait_for([&](io::Callback answer) {
                 to->write(kind, chunk, std::move(buffer), std::move(answer));
               }).error);
      done += bytes;
      if (progress) progress("moving the state", done, total);
    }
    bring_beside(first, storage.folders, from.store->generation());
    throw_if(to->commit(from.store->progress()));
    // What lies beside it goes by the generation's letter.
    if ((to->generation() - from.store->generation()) % 2 != 0) throw_if(to->commit(from.store->progress()));
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
  if (all.size() < count) all = noted_folders(all);
  const auto parts = parts_in(all, io::VolumeOptions{}.name);
  const bool whole = parts.size() == count && of_one_volume(parts) && parts.begin()->second == here.begin()->second;
  return whole ? all : Folders{};
}

void settle_store(const io::VolumeOptions& storage, const Say& say, const Progress& progress) {
  if (storage.folders.empty()) return;
  if (is_committed(storage)) {
    say("the state was moved, and the end of that was interrupted: it is done now");
    // The first store may be whole, in part or gone.
    take_place(storage, noted_folders(storage.folders));
    return;
  }
  throw_if(io::discard(named(storage, kMovingStore)));
  const Folders first = store_elsewhere(storage.folders);
  if (first.empty()) return;
  {
    const StoredModel from = open_stored_model(first);
    if (from.contents.generations != 2) return;
    std::string names;
    for (const fs::path& folder : first) names += (names.empty() ? "" : ", ") + folder.string();
    say(fmt::format("the state lies in {}: it is copied into the {} folders of this run, verified, and removed there",
                    names, storage.folders.size()));
    copy(from, first, storage, progress);
  }
  take_place(storage, first);
}

bool can_resume(const SessionOptions& options, const Say& say) {
  settle_store(storage_volume(options), say, {});
  const LeftStore left = find_left_store(options.storage);
  if (left.empty) discard_store(options.storage);
  return left.resumable;
}

}  // namespace tierflow

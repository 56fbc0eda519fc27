#include "runtime/planning/left_store.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <ctime>
#include <nlohmann/json.hpp>
#include <span>
#include <thread>

#include "io/checksum.h"
#include "io/discard.h"
#include "runtime/base/exception.h"
#include "runtime/base/files.h"
#include "runtime/planning/missed_updates.h"
#include "swap/store.h"

namespace tierflow {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

io::VolumeOptions volume_of(const Folders& storage) {
  return {.folders = storage, .allow_buffered = true, .allow_any_filesystem = true};
}

fs::path note_in(const fs::path& folder) {
  return folder / "state.tfv.owner";
}

fs::path reference_in(const fs::path& folder) {
  return folder / "state.tfv.reference";
}

fs::path beside(const fs::path& folder, std::uint64_t generation) {
  return folder / (generation % 2 == 0 ? "state.tfv.beside.A" : "state.tfv.beside.B");
}

std::string checksum_of(std::string_view bytes) {
  return fmt::format("{:016x}", io::content_hash(std::as_bytes(std::span(bytes))));
}

std::string local_time(std::time_t when) {
  std::array<char, 32> text{};
  struct tm parts {};
  localtime_r(&when, &parts);
  return {text.data(), std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M:%S", &parts)};
}

// An empty object where there is none, or not one of ours.
json note_of(const fs::path& folder) {
  try {
    json note = json::parse(read_text(note_in(folder), 1 << 16), nullptr, false);
    if (note.is_object()) return note;
  } catch (const std::exception&) {  // the state's own time is what is known
  }
  return json::object();
}

// Of what somebody else may have written: 0 and "" where there is nothing of that kind.
std::int64_t number_in(const json& object, const char* key) {
  const auto found = object.is_object() ? object.find(key) : object.end();
  return object.is_object() && found != object.end() && found->is_number_integer() ? found->get<std::int64_t>() : 0;
}
std::string text_in(const json& object, const char* key) {
  const auto found = object.is_object() ? object.find(key) : object.end();
  return object.is_object() && found != object.end() && found->is_string() ? found->get<std::string>() : "";
}

// "process 12 on HOST, which began at TIME; last written at TIME"
std::string whose(const json& note, const fs::path& state) {
  std::string text = "an earlier run";
  if (!note.empty())
    text = fmt::format("process {} on {}, which began at {}", number_in(note, "pid"), printable(text_in(note, "host")),
                       local_time(number_in(note, "began")));
  struct stat status {};
  if (stat(state.c_str(), &status) == 0) text += "; last written at " + local_time(status.st_mtime);
  return text;
}

// ": A, B", where the note names the folders of the state.
std::string folders_in(const json& note) {
  const json folders = note.value("folders", json());
  std::string text;
  for (const json& folder : folders.is_array() ? folders : json::array())
    if (folder.is_string()) text += (text.empty() ? ": " : ", ") + printable(folder.get<std::string>());
  return text;
}

bool is_of_another_user(int error_number) {
  return error_number == EACCES || error_number == EPERM;
}

[[noreturn]] void refuse_another_user(const fs::path& state) {
  fail(io::ErrorKind::environment, state.string(),
       "this user may not read it: run as the user who trained, or change the owner of its folder and files");
}

// Of the store that has a part in these folders: how many of them have one, and how many folders it lies in.
struct Parts {
  std::size_t found = 0, all = 0;
};
Parts parts_in(const Folders& storage) {
  Parts parts;
  for (const fs::path& folder : storage)
    if (auto part = io::membership(volume_of(storage), folder); part.ok() && part->has_value()) {
      ++parts.found;
      parts.all = (*part)->count;
    }
  return parts;
}

// state: the store's file in `folder`, one of `storage`.
void refuse_other_folders(const Folders& storage, const Parts& parts, const fs::path& folder, const fs::path& state) {
  for (std::size_t i = 0; i < storage.size(); ++i)
    if (names_folder({storage.begin() + static_cast<std::ptrdiff_t>(i) + 1, storage.end()}, storage[i]))
      fail(io::ErrorKind::usage, storage[i].string(), "is named twice");
  if (parts.found == 0 || parts.all >= storage.size()) return;
  fail(io::ErrorKind::usage, state.string(),
       parts.all == 1 ? fmt::format("holds a whole state, and {} folders were named: name {} alone", storage.size(),
                                    folder.string())
                      : fmt::format("holds a part of a state over {} folders, and {} were named: name only these",
                                    parts.all, storage.size()));
}

bool was_interrupted(const Folders& storage) {
  io::Result<bool> found = io::creation_was_interrupted(volume_of(storage));
  return found.ok() && *found;
}

}  // namespace

std::string export_command(const Folders& storage) {
  std::string text = "`tierflow export --storage ";
  for (std::size_t i = 0; i < storage.size(); ++i) {
    if (i > 0) text += ',';
    text += storage[i].string();
  }
  return text + " --out FOLDER`";
}

namespace {

// held is_read: the run that holds it may be in the middle of a commit, which is soon over.
io::Result<swap::Store::Contents> contents_of(const Folders& storage, Held held) {
  io::VolumeOptions volume = volume_of(storage);
  volume.beside_owner = held == Held::is_read;
  auto contents = swap::Store::inspect(volume);
  for (int tries = 0; volume.beside_owner && tries < 10 && (!contents.ok() || !contents->passed_over.empty());
       ++tries) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    contents = swap::Store::inspect(volume);
  }
  return contents;
}

}  // namespace

LeftStore find_left_store(const Folders& storage, Held held) {
  LeftStore left;
  for (const fs::path& folder : storage) {
    const fs::path state = folder / (io::VolumeOptions{}.name + ".tfv");
    std::error_code unknown;
    const bool there = fs::exists(fs::symlink_status(state, unknown));
    if (is_of_another_user(unknown.value())) refuse_another_user(state);
    if (left.there || !there) continue;
    left.there = true;
    left.state = state;
    auto contents = contents_of(storage, held);
    const io::Error why = contents.ok() ? io::Error{} : contents.error();
    if (is_of_another_user(why.error_number)) refuse_another_user(state);
    if (why && (why.kind == io::ErrorKind::locked || why.kind == io::ErrorKind::io)) throw Exception(why);
    const Parts parts = why ? parts_in(storage) : Parts{};
    if (why) refuse_other_folders(storage, parts, folder, state);
    const bool blank = contents.ok() && contents->generation == 0;
    const json note = note_of(storage.front());
    // The note comes right after the store: without one, the store was never used.
    left.empty = note.empty() ? blank || was_interrupted(storage) : blank && note.value("commits", json()) == true;
    left.owner = whose(note, state);
    left.readable = contents.ok() && !blank;
    struct stat status {};
    if (stat(state.c_str(), &status) == 0) left.written = status.st_mtime;
    if (left.readable) {
      const json progress = json::parse(contents->progress, nullptr, false);
      const json identity = json::parse(contents->identity, nullptr, false);
      left.step = number_in(progress, "step");
      left.generation = contents->generation;
      left.generations = contents->generations;
      left.passed_over = contents->passed_over;
      left.run = text_in(identity, "run");
      left.client = text_in(progress, "client");
      left.chunk_elements = contents->chunk_elements;
      left.embedding_part = embedding_part_of(contents->identity);
      left.streamed = identity.is_object() && !identity.contains("config");
      left.resumable = !left.streamed && contents->generations == 2;
      left.line =
          left.streamed
              ? fmt::format(
                    "holds the state after step {} of {}: the script that made it goes on with it, {} writes it "
                    "as a model folder",
                    left.step, left.owner, export_command(storage))
              : fmt::format("holds the state after step {} of {}: {} writes it as a model folder, --fresh discards it",
                            left.step, left.owner, export_command(storage));
    } else if (parts.found != parts.all && !left.empty) {
      left.in_part = storage.size() < parts.all;
      left.damaged = !left.in_part;
      left.line = fmt::format("is part of a state over {} folders of {}", parts.all, left.owner) +
                  (left.in_part ? fmt::format(": name all of them{}", folders_in(note))
                                : fmt::format(", and a part in another folder is missing or damaged ({}): if its file "
                                              "was moved or replaced, put it back; --fresh discards what is here",
                                              why.message()));
    } else if (blank) {
      left.line = fmt::format(
          "was left by {}, which ended early, and nothing can be got out of it (the run that made it ended before its "
          "first commit): --fresh discards it",
          left.owner);
    } else {
      left.damaged = true;
      left.line = fmt::format(
          "holds the state of {}, and nothing can be got out of it ({}): if a file of it was moved or replaced, put it "
          "back; --fresh discards it",
          left.owner, why.detail.empty() ? why.message() : why.detail);
    }
  }
  return left;
}

LeftStore expect_left_store(const Folders& storage) {
  LeftStore left = find_left_store(storage);
  if (!left.there)
    fail(io::ErrorKind::input, storage.front().string(),
         "holds no state of a training run: --storage names the folders that the run was given");
  return left;
}

bool is_of_train(const std::string& run) {
  const json then = json::parse(run, nullptr, false);
  return then.is_object() && then.contains("sequence-length") && then.contains("micro-batches");
}

void refuse_left_store(const Folders& storage, const std::string& more) {
  const LeftStore left = find_left_store(storage);
  if (left.there)
    fail(left.damaged ? io::ErrorKind::corruption : io::ErrorKind::environment, left.state.string(),
         left.line + "; or name another folder as --storage" + more);
}

fs::path reference_beside(const Folders& storage) {
  for (const fs::path& folder : storage)
    if (std::error_code ignored; fs::exists(fs::symlink_status(reference_in(folder), ignored)))
      return reference_in(folder);
  return reference_in(storage.front());
}

void bring_reference(const Folders& from, const Folders& to) {
  const fs::path there = reference_beside(from);
  if (std::error_code ignored; !fs::exists(fs::symlink_status(there, ignored))) return;
  write_copy(reference_in(to.front()), open_regular(there), there);
  sync_folder(to.front());
}

void discard_store(const Folders& storage, bool held) {
  io::VolumeOptions volume = volume_of(storage);
  volume.read_only = held;
  throw_if(io::discard(volume));
  io::VolumeOptions moving = volume_of(storage);
  moving.name = kMovingStore;
  throw_if(io::discard(moving));
  remove_note(storage);
}

void leave_note(const Folders& storage, bool commits) {
  std::string host(256, '\0');
  if (gethostname(host.data(), host.size() - 1) != 0) host.clear();
  json folders = json::array();
  std::error_code unknown;
  for (const fs::path& folder : storage) folders.push_back(fs::absolute(folder, unknown).lexically_normal().string());
  const json note{{"pid", getpid()},
                  {"host", host.c_str()},
                  {"began", std::time(nullptr)},
                  {"commits", commits},
                  {"folders", folders}};
  try {
    for (const fs::path& folder : storage) write_text(note_in(folder), note.dump() + "\n");
  } catch (const std::exception&) {  // the store itself is what counts
  }
}

void remove_note(const Folders& storage) {
  for (const fs::path& folder : storage) {
    unlink(reference_in(folder).c_str());
    unlink(note_in(folder).c_str());
    for (const std::uint64_t generation : {0, 1})
      for (const char* suffix : {"", ".partial"}) unlink((beside(folder, generation).string() + suffix).c_str());
  }
}

std::string keep_beside(const Folders& storage, std::uint64_t generation, std::string_view bytes) {
  write_text(beside(storage.front(), generation), bytes, 0600);
  sync_folder(storage.front());
  // Of a run that named the folders in another order.
  for (const fs::path& folder : std::span(storage).subspan(1)) unlink(beside(folder, generation).c_str());
  return checksum_of(bytes);
}

Folders noted_folders(const Folders& some) {
  for (const fs::path& folder : some) {
    const json listed = note_of(folder).value("folders", json());
    Folders all;
    for (const json& name : listed)
      if (name.is_string()) all.emplace_back(name.get<std::string>());
    if (names_folder(all, folder)) return all;
  }
  return some;
}

bool names_folder(const Folders& folders, const fs::path& folder) {
  return std::ranges::any_of(folders, [&](const fs::path& other) {
    std::error_code absent;
    return fs::equivalent(folder, other, absent);
  });
}

void bring_beside(const Folders& from, const Folders& to, std::uint64_t generation, const std::string& checksum) {
  write_text(beside(to.front(), generation), read_beside(from, generation, checksum), 0600);
  sync_folder(to.front());
}

io::Error check_beside(const Folders& storage, std::uint64_t generation, const std::string& progress) {
  const std::string checksum = text_in(json::parse(progress, nullptr, false), "beside");
  if (checksum.empty()) return {};
  try {
    read_beside(storage, generation, checksum);
  } catch (const Exception& wrong) {
    return wrong.error();
  }
  return {};
}

std::string read_beside(const Folders& storage, std::uint64_t generation, const std::string& checksum) {
  for (const fs::path& folder : storage) {
    std::error_code absent;
    if (!fs::is_regular_file(fs::symlink_status(beside(folder, generation), absent))) continue;
    std::string bytes = read_text(beside(folder, generation), std::uint64_t{1} << 40);
    if (checksum_of(bytes) == checksum) return bytes;
  }
  fail(io::ErrorKind::corruption, beside(storage.front(), generation).string(),
       "is missing or is not what was written with generation " + std::to_string(generation) +
           " of the state beside it");
}

}  // namespace tierflow

#pragma once
// The store that an earlier run left in the storage folders: who made it, and how it is removed.
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "io/error.h"

namespace tierflow {

using Folders = std::vector<std::filesystem::path>;

// io::VolumeOptions::name of a store that is being moved to other folders, until it takes the place of the first.
inline constexpr const char* kMovingStore = "state.tfv-moving";

// The command that exports the state from the folders, in quotes.
std::string export_command(const Folders& storage);

struct LeftStore {
  bool there = false;
  bool empty = false;      // made by a run that commits, and that ended before its first commit
  bool resumable = false;  // SessionOptions::resume can resume from it
  bool streamed = false;   // a Streamer made it, and a durable Streamer can resume from it
  bool in_part = false;    // it lies in other folders too, which were not named
  bool readable = false;   // it has a committed generation
  bool damaged = false;    // it had one, and nothing of it can be read
  std::int64_t step = 0;
  std::uint64_t generation = 0;  // the newest that was committed
  int generations = 0;           // how many it keeps
  std::string passed_over;       // why a newer generation may have been committed that cannot be read
  std::int64_t written = 0;      // when its files were last written, in seconds of the Unix clock
  std::uint64_t chunk_elements = 0;
  std::uint64_t embedding_part = 0;  // as in SessionOptions
  std::string run;                   // SessionOptions::run of the session that made it
  std::string client;                // what that session was given by remember()
  std::filesystem::path state;
  std::string owner;  // process, host and times, as far as they are known
  std::string line;   // who made it, when, and what to do; printed after the path
};
// Whether that LeftStore::run is one that `tierflow train` wrote, and no script or program that has its own loop.
bool is_of_train(const std::string& run);
enum class Held : std::uint8_t { is_refused, is_read };
// Throws Exception of kind locked if a process holds it, unless `held` says that it is read while that process holds
// it; of kind io if the drive fails, so that nobody takes for lost what can be read later; of kind usage if folders are
// named that have no part of the store, or one is named twice.
LeftStore find_left_store(const Folders& storage, Held held = Held::is_refused);
// The same where a store is what the user named: throws Exception of kind input if there is none.
LeftStore expect_left_store(const Folders& storage);

// Throws Exception if a store lies in one of the folders: of kind locked if a process holds it; else of kind
// corruption if it is damaged, or environment, which says who made it, when, and what to do, and then `more`.
void refuse_left_store(const Folders& storage, const std::string& more = {});
// The file in which a run keeps the log-probabilities that its preference loss compares with. It lies beside the store,
// in one of the folders, and goes with the store. If there is none yet: the place that it will have.
std::filesystem::path reference_beside(const Folders& storage);
// Copies it into the first of the other folders, if it exists.
void bring_reference(const Folders& from, const Folders& to);
// Removes it, whole or not, and an unfinished file that was to take its place. Throws Exception (kind locked) if a
// process holds it. held: this process has it open for reading, so that no other process can resume it.
void discard_store(const Folders& storage, bool held = false);

// Writes which process made the store, when, in which folders, and whether it commits its steps, in a small file in
// each folder, which find_left_store() reads. If it cannot be written, there is no note.
void leave_note(const Folders& storage, bool commits);
// Removes it, what keep_beside() left, and the reference.
void remove_note(const Folders& storage);
// All folders of the store that has a part in these, as a note says that names the folder it lies in (a note in a copy
// of a folder does not). If there is no such note: these folders.
Folders noted_folders(const Folders& some);
// Whether one of the folders is this one, whatever the path.
bool names_folder(const Folders& folders, const std::filesystem::path& folder);

// Keeps bytes of a client's own beside a generation of the store that is about to be committed, in a file of the first
// folder: two in turn, as the store's superblocks. They are flushed when it returns; the checksum is what
// read_beside() finds them by.
std::string keep_beside(const Folders& storage, std::uint64_t generation, std::string_view bytes);
// Copies what is kept beside this generation into the first of the other folders. Throws as read_beside().
void bring_beside(const Folders& from, const Folders& to, std::uint64_t generation, const std::string& checksum);
// Whether the bytes that a commit with this `progress` kept beside it exist and are what was written. If `progress`
// names none, there are none. For swap::StoreOptions::check_beside.
io::Error check_beside(const Folders& storage, std::uint64_t generation, const std::string& progress);
// Throws Exception (kind corruption) if none of the folders has these bytes.
std::string read_beside(const Folders& storage, std::uint64_t generation, const std::string& checksum);

}  // namespace tierflow

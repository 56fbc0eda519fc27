#pragma once
// The store that an earlier run left in the storage folders: who made it, and how it is removed.
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace tierflow {

using Folders = std::vector<std::filesystem::path>;

// The command that exports the state from the folders, in quotes.
std::string export_command(const Folders& storage);

struct LeftStore {
  bool there = false;
  bool empty = false;      // of a run that commits and ended before its first commit
  bool resumable = false;  // SessionOptions::resume goes on with it
  bool readable = false;   // a committed generation
  std::int64_t step = 0;
  std::uint64_t chunk_elements = 0;
  std::string run;  // SessionOptions::run of the session that made it
  std::filesystem::path state;
  std::string owner;  // process, host and times, as far as they are known
  std::string line;   // who made it, when, and what to do: behind the path
};
// Throws Exception (kind locked) where a process holds it.
LeftStore find_left_store(const Folders& storage);

// Throws Exception where a store lies in one of the folders: kind locked where a process holds it; else kind
// environment, saying who made it, when, and what to do.
void refuse_left_store(const Folders& storage);
// The file beside the store in which a run keeps what its preference loss is relative to: where it lies, in whichever
// of the folders; where there is none, where it is to be. It goes with the store.
std::filesystem::path reference_beside(const Folders& storage);
// Removes it, whole or not. Throws Exception (kind locked) where a process holds it.
void discard_store(const Folders& storage);

// Writes which process made the store, when, and whether it commits its steps, in a small file beside it, which
// find_left_store() reads. If it cannot be written, there is no note.
void leave_note(const Folders& storage, bool commits);
// Removes it, and the reference.
void remove_note(const Folders& storage);

}  // namespace tierflow

#pragma once
// The store that an earlier run left in the storage folders: who made it, and how it is removed.
#include <filesystem>
#include <string>
#include <vector>

namespace tierflow {

using Folders = std::vector<std::filesystem::path>;

// The command that exports the state from the folders, in quotes.
std::string export_command(const Folders& storage);

// Throws Exception where a store lies in one of the folders: kind locked where a process holds it; else kind
// environment, saying who made it, when, and what to do.
void refuse_left_store(const Folders& storage);
// Removes it, whole or not. Throws Exception (kind locked) where a process holds it.
void discard_store(const Folders& storage);

// Writes which process made the store, and when, in a small file beside it: a later refuse_left_store() reads it. If it
// cannot be written, there is no note.
void leave_note(const Folders& storage);
void remove_note(const Folders& storage);

}  // namespace tierflow

#pragma once
// The store that an earlier run left in the storage folders: whose it is, and how one gets rid of it.
#include <filesystem>
#include <string>
#include <vector>

namespace tierflow {

using Folders = std::vector<std::filesystem::path>;

// What a user types to get the state out of the folders, in quotes.
std::string export_command(const Folders& storage);

// Throws Exception where a store lies in one of the folders: kind locked where a process holds it; else kind
// environment, saying whose it is, of when, and what to do.
void refuse_left_store(const Folders& storage);
// Removes it, whole or not. Throws Exception (kind locked) where a process holds it.
void discard_store(const Folders& storage);

// Which process made the store and when, in a small file beside it, for refuse_left_store() of a later one. A note that
// cannot be written is none.
void leave_note(const Folders& storage);
void remove_note(const Folders& storage);

}  // namespace tierflow

#pragma once
// A store that goes on in other folders than those in which it lies (more or fewer drives, or others), or in chunks of
// another size.
#include "io/volume.h"
#include "runtime/base/progress.h"
#include "runtime/planning/left_store.h"
#include "runtime/planning/profile.h"
#include "runtime/planning/session_options.h"
#include "swap/layout.h"

namespace tierflow {

// Some folder of `storage` may have a part of a store whose parts do not lie in exactly these folders. Returns the
// folders in which the whole store lies: some of `storage`, if all parts are there; else those that its note names.
// Empty: there is nothing to move. Throws Exception (kind locked) where a process holds the store.
Folders store_elsewhere(const Folders& storage);

// Ends a move into storage.folders that was interrupted: its copy takes the place of the first store, if that is not
// whole any more; a copy beside a whole one is removed. Returns store_elsewhere(). Throws Exception: kind locked where
// another process moves it, usage where it takes other folders to end it.
Folders finish_move(const io::VolumeOptions& storage, const Say& say);

// Brings the store in `first`, of two generations, into storage.folders. Its newest generation is copied into a second
// store there, each extent verified as it is read; that becomes durable, and takes the place of the first, which is
// removed. Until then the first is whole and stays. There must be room for both meanwhile. Call after finish_move(),
// with what it returned, and once it is known that the state is this run's. Throws Exception.
void move_store(const io::VolumeOptions& storage, const Folders& first, const Say& say, const Progress& progress);

// Brings the store in storage.folders, of two generations, into chunks of `chunk_elements`: copied there as
// move_store() copies it, and as safe. Call once it is known that the state is this run's. Throws Exception.
void recut_store(const io::VolumeOptions& storage, std::uint64_t chunk_elements, const Say& say,
                 const Progress& progress);
// What that writes: weights and state.
std::uint64_t copied_bytes(const swap::Layout& layout);

// Whether an earlier run left a state in options.storage that SessionOptions::resume goes on with, whole in these
// folders. What ended before its first commit is removed. Throws Exception.
bool can_resume(
    const SessionOptions& options, const Say& say = [](const std::string&) {});

}  // namespace tierflow

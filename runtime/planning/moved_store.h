#pragma once
// Moves a store to other folders (more or fewer drives, or other ones), or into chunks of another size.
#include "io/volume.h"
#include "runtime/base/progress.h"
#include "runtime/planning/left_store.h"
#include "runtime/planning/session_options.h"
#include "swap/layout.h"

namespace tierflow {

// Some folder of `storage` may have a part of a store whose parts do not lie in exactly these folders. Returns the
// folders in which the whole store lies: some of `storage`, if all parts are there; else those that its note names.
// Empty: there is nothing to move. Throws Exception (kind locked) if a process holds the store.
Folders store_elsewhere(const Folders& storage);

// Ends an interrupted move into storage.folders: the copy takes the place of the first store if that is no longer
// whole; a copy beside a whole store is removed. Returns store_elsewhere(). Throws Exception of kind locked if another
// process moves it, and of kind usage if other folders are needed to end it.
Folders finish_move(const io::VolumeOptions& storage, const Say& say);

// Moves the store in `first`, of two generations, into storage.folders. Its newest generation is copied into a second
// store there, and each extent is verified as it is read. When the copy is durable, it takes the place of the first
// store, which is removed. Until then the first store is whole. There must be room for both. Call after finish_move(),
// with what it returned, and once it is known that the state is this run's. Throws Exception.
void move_store(const io::VolumeOptions& storage, const Folders& first, const Say& say, const Progress& progress);

// Copies the store in storage.folders, of two generations, into chunks of `chunk_elements`, in the way and with the
// safety of move_store(). Call once it is known that the state is this run's. Throws Exception.
void recut_store(const io::VolumeOptions& storage, std::uint64_t chunk_elements, const Say& say,
                 const Progress& progress);
// The bytes that this writes: weights and state.
std::uint64_t copied_bytes(const swap::Layout& layout);

// Whether an earlier run left a state in options.storage from which SessionOptions::resume can resume, whole in these
// folders. The remains of a run that ended before its first commit are removed. Throws Exception.
bool can_resume(
    const SessionOptions& options, const Say& say = [](const std::string&) {});

}  // namespace tierflow

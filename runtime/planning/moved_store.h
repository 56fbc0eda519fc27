#pragma once
// A store that goes on in other folders than those in which it lies: more or fewer drives, or others.
#include "io/volume.h"
#include "runtime/base/progress.h"
#include "runtime/planning/left_store.h"
#include "runtime/planning/profile.h"
#include "runtime/planning/session_options.h"

namespace tierflow {

// Where the whole store of which some folder of `storage` has a part lies, if it is not there in exactly these folders.
// Known where all of it is in some of them, or where its note names the folders. Empty: there is nothing to move.
// Throws Exception (kind locked) where a process holds it.
Folders store_elsewhere(const Folders& storage);

// Brings such a store into storage.folders, and ends what an earlier call began. Its newest generation is copied into a
// second store there, each extent verified as it is read; that becomes durable, and takes the place of the first, which
// is removed. Until then the first is whole and stays: if it is interrupted, the next call begins anew or goes on.
// There must be room for both meanwhile. Does nothing where nothing is elsewhere, or where no run could go on with it.
// Throws Exception.
void settle_store(const io::VolumeOptions& storage, const Say& say, const Progress& progress);

// Whether an earlier run left a state in options.storage that SessionOptions::resume goes on with, settled there. What
// ended before its first commit is removed. Throws Exception.
bool can_resume(
    const SessionOptions& options, const Say& say = [](const std::string&) {});

}  // namespace tierflow

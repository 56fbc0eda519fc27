#pragma once
// How one gets rid of a volume that nobody can open any more.
#include "io/volume.h"

namespace tierflow::io {

// Removes the data files that an earlier Volume left in the folders, whole or not; those that are missing do not
// matter. Where another process holds one (kind locked), nothing is removed.
Error discard(const VolumeOptions& options);

}  // namespace tierflow::io

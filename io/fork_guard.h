#pragma once
// A lock of flock() belongs to an open file, and a forked child has the file too: it would hold the lock after its
// parent has ended. So a child closes the descriptors that are listed here, before fork() returns in it.
namespace tierflow::io {

// From now on a child forked by this process has /dev/null in place of this descriptor, so that using it by mistake
// does no harm.
void keep_from_children(int descriptor);
// Call before the descriptor is closed.
void no_longer_kept(int descriptor);

}  // namespace tierflow::io

#pragma once
// A lock of flock() belongs to an open file, and a forked child has the file too: it would hold the lock when its
// parent is gone. So a child gives up what is listed here, before fork() returns in it.
namespace tierflow::io {

// From now on a child forked by this process has /dev/null in this descriptor's place: what it does with it by mistake
// harms nobody.
void keep_from_children(int descriptor);
// Call before the descriptor is closed.
void no_longer_kept(int descriptor);

}  // namespace tierflow::io

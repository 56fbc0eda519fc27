#pragma once
// Making files where room may become free a little later.
#include <cerrno>
#include <chrono>
#include <thread>

#include "io/error.h"

namespace tierflow {

// What `make`, which returns an io::Result, comes to. A full drive is tried again for three seconds: the kernel frees
// what a removed file, a failed attempt or a killed process took when it has closed its ring, a little later.
template <class Make>
auto with_room(const Make& make) {
  auto made = make();
  for (int tries = 0; tries < 30 && !made.ok() && made.error().error_number == ENOSPC; ++tries) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    made = make();
  }
  return made;
}

}  // namespace tierflow

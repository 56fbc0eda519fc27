#pragma once
// Finds the best engine that really works on these files. Each candidate must write, flush, read back and compare a
// block before it is trusted, because a ring can often be set up where using it is forbidden. From files that already
// hold a volume the probe only reads: nothing is written to them before their owner has decided to resume from them.
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "io/engine.h"

namespace tierflow::io {

struct ProbeOptions {
  EngineKind wanted = EngineKind::automatic;  // another kind is used, or the probe fails: it tries no other one
  unsigned depth = 32;                        // over all files
  std::size_t alignment = 4096;
  bool direct = true;
  bool read_only = false;  // the probe only reads
  std::uint64_t scratch_offset =
      0;  // in each file: bytes that the probe may overwrite, at least 2 blocks of the alignment
  std::chrono::seconds limit{300};
  std::function<std::unique_ptr<Backend>(std::unique_ptr<Backend>)> wrap_backend;
};

struct Probed {
  std::unique_ptr<Engine> engine;
  std::vector<std::string> warnings;
};

// Call it on the thread that will drive the engine.
Result<Probed> probe_engine(const std::vector<EngineFile>& files, const ProbeOptions& options);

}  // namespace tierflow::io

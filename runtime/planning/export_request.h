#pragma once
// How `tierflow export` asks a run that holds the state for its model: over a local socket, named by the state's first
// file, that goes with the run's process. Both belong to one user; a run in another network namespace (another
// container) cannot be asked. A message is a folder's path, the answer a JSON object: {"step"} where the model is whole
// there, {"error": io::ErrorKind, "detail"} where it could not be written. A `tierflow train` answers, and a durable
// run in Python.
#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>

#include "io/descriptor.h"
#include "io/error.h"
#include "runtime/base/progress.h"
#include "runtime/planning/left_store.h"

namespace tierflow {

// The run's side. Requests wait until answer().
class ExportRequests {
 public:
  // Call it when the state's files exist. Without folders nobody can ask. If the system gives no socket, nobody can ask
  // either, and the user is told.
  ExportRequests(const Folders& storage, const Say& say);
  // Tells the asking command that the model is there, or why it is not; kind cancelled: the run ends. Called once.
  using Answer = std::function<void(const io::Error& error)>;
  // Calls `write` for each folder that somebody waits for, while `may` says so: it sees to it that the model which
  // `step` steps made is written there, and that who asks is answered. Does not wait for who asks, and looks at 32 of
  // them at most.
  void answer(std::int64_t step, const std::function<bool()>& may,
              const std::function<void(const std::filesystem::path& out, const Answer& answer)>& write);

 private:
  io::Descriptor listens_;
  io::Descriptor unanswered_;  // commands that wait there learn of the run's end when this is closed
};

// Asks the run that holds the state in these folders for its model in `out`, and waits for it. Returns the step of that
// model; nothing if the run ends before it answers. Throws Exception with what the run says was wrong, or of kind
// locked, with what to do, if nobody there takes requests; throws Stopped.
std::optional<std::int64_t> ask_for_export(const Folders& storage, const std::filesystem::path& out,
                                           const io::Error& locked, const Say& say);

}  // namespace tierflow

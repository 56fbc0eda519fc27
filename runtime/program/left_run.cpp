#include "runtime/program/left_run.h"

#include "runtime/base/exception.h"
#include "runtime/planning/moved_store.h"
#include "runtime/planning/storage_volume.h"
#include "runtime/program/run_identity.h"
#include "runtime/program/run_record.h"
#include "runtime/program/run_result.h"

namespace tierflow {
namespace {

// The run is finished. It may have been killed between its result and the end of its state. But what lies there may as
// well be the state of the run that came after it in the same folders.
void end_state(const TrainOptions& options, const LeftRun& left, TrainingLog& log) {
  if (!left.store.there) return remove_note(options.storage);
  const bool same =
      left.store.resumable &&
      RunRecord::parse(left.store.client).configuration == configuration_hash(effective_configuration(options)) &&
      left.elsewhere.empty();
  if (same) return discard_store(options.storage);
  log.say(left.store.state.string() + " is the state of another run, and stays");
}

}  // namespace

LeftRun find_left_run(const TrainOptions& options, TrainingLog& log) {
  LeftRun left;
  if (options.fresh || options.storage.empty()) return left;
  left.elsewhere = finish_move(volume_in(options, engine_kind(options.engine)), log.teller());
  const Folders& lies = left.elsewhere.empty() ? options.storage : left.elsewhere;
  left.store = find_left_store(lies);
  left.finished = has_result(options);
  if (left.finished) {
    log.say("the run is finished: its result is in " + options.out.string());
    end_state(options, left, log);
    return left;
  }
  if (left.store.there && !left.store.empty && !left.store.resumable)
    refuse_left_store(lies, left.store.readable ? "" : what_else_is_left(options));
  if (options.resume && !left.store.resumable)
    fail(io::ErrorKind::usage, options.storage.front().string(),
         "holds no state to go on with: without --resume the run begins anew");
  if (left.store.empty) {
    log.say(left.store.state.string() + " is of a run that ended before its first commit: it is removed");
    discard_store(lies);
    left.elsewhere.clear();
  }
  return left;
}

}  // namespace tierflow

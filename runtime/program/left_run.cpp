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
// well be the state of the run that came after it in the same folders. maker: of that result.
void end_state(const TrainOptions& options, const LeftRun& left, const std::string& maker, TrainingLog& log) {
  if (!left.store.there) return remove_note(options.storage);
  const bool same = left.store.resumable &&
                    RunRecord::parse(left.store.client).configuration == configuration_hash(maker) &&
                    left.elsewhere.empty();
  if (same) return discard_store(options.storage);
  log.say(left.store.state.string() + " is the state of another run, and stays");
}

// Nothing is written over the result of a run, and only a run with storage takes it for its own.
[[noreturn]] void refuse_result(const TrainOptions& options, const std::string& differs, const std::string& stopped) {
  const std::string result =
      stopped.empty() ? "holds the result of a finished run, which stays; that run had "
                      : "holds what a run that was stopped after " + stopped + " trained, which stays; that run had ";
  fail(io::ErrorKind::usage, options.out.string(),
       !differs.empty() ? result + differs + ": name another folder as --out for this one"
       : stopped.empty()
           ? "holds the result of this very run, which is finished: to do it once more, name another folder as --out"
           : "holds what this very run trained until it was stopped after " + stopped +
                 ", and its state is gone: to do it from the beginning, name another folder as --out");
}

}  // namespace

LeftRun find_left_run(const TrainOptions& options, TrainingLog& log) {
  LeftRun left;
  const std::string maker = maker_of_result(options);
  const std::string stopped = was_stopped(maker);
  const std::string differs = maker.empty() ? "" : other_result(maker, effective_configuration(options));
  if (!maker.empty() && (!differs.empty() || options.fresh || options.storage.empty()))
    refuse_result(options, differs, stopped);
  if (options.fresh || options.storage.empty()) return left;
  left.elsewhere = finish_move(volume_in(options, engine_kind(options.engine)), log.teller());
  const Folders& lies = left.elsewhere.empty() ? options.storage : left.elsewhere;
  left.store = find_left_store(lies);
  if (!stopped.empty() && !left.store.resumable) refuse_result(options, differs, stopped);
  left.finished = !maker.empty() && stopped.empty();
  if (left.finished) {
    log.say("the run is finished: its result is in " + options.out.string() +
            ", of --model and --data as they were then");
    end_state(options, left, maker, log);
    return left;
  }
  if (left.store.there && !left.store.empty && !left.store.resumable)
    refuse_left_store(lies, left.store.readable || left.store.damaged ? "" : what_else_is_left(options));
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

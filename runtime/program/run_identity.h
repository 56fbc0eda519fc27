#pragma once
// What has to be equal for a run to resume the state of another run, to the bit.
#include <cstdint>
#include <optional>
#include <string>

#include "runtime/planning/left_store.h"
#include "runtime/program/options.h"

namespace tierflow {

// weights_hash() of --model without what SourceFolder copies, of which the session has a hash. spec: of the model that
// is trained. Nothing where the model is made of --config, or where a run that is resumed finds the weights gone.
std::optional<std::uint64_t> hash_of_weights(const TrainOptions& options, const ModelSpec& spec, bool resumed);

// A JSON object, by option. data: Dataset::fingerprint(). weights: hash_of_weights().
// teacher: TeacherFile::hash(), where there is one. base_is_reference: as in LossRule. The model's shape and the
// precision are the session's to compare; learning rate, schedule and the number of steps may change.
std::string run_identity(const TrainOptions& options, std::uint64_t data, std::optional<std::uint64_t> weights = {},
                         std::optional<std::uint64_t> teacher = {}, bool base_is_reference = false);

// `now` with what `then` says of the weights of --model: earlier versions say nothing, and a folder that is gone cannot
// be asked. Both are of expect_same_run().
std::string with_weights_of(const std::string& then, const std::string& now);

// What a run_identity() says of them, or empty.
std::string weights_of_run(const std::string& identity);

// Of what effective_configuration() says, but for --resume, --fresh and --go-back: it tells what one command left from
// what another did.
std::string configuration_hash(const std::string& effective);

// Where two commands, of which these are the effective_configuration(), would not have the same result: "--steps 3, not
// 6 and --lr ...", the first one's value first. Empty where only options differ that say how and where a run is done,
// what it shows and logs, or where --out is; and in what was_stopped() says.
std::string other_result(const std::string& then, const std::string& now);

// effective_configuration() of a run whose result is of an earlier step than its last: with the key `stopped`.
std::string stopped_at(const std::string& effective, std::int64_t step, std::int64_t of);
// Of that: "step 3 of 6"; empty where the run came to its own end.
std::string was_stopped(const std::string& effective);

// Throws Exception (kind usage) that names what differs and says what to do.
void expect_same_run(const std::string& then, const std::string& now, const Folders& storage);

}  // namespace tierflow

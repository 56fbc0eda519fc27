#pragma once
// What has to be equal for a run to resume the state of another run, to the bit.
#include <cstdint>
#include <optional>
#include <string>

#include "runtime/planning/left_store.h"
#include "runtime/program/options.h"

namespace tierflow {

// A JSON object, by option. data: Dataset::fingerprint(). teacher: TeacherFile::hash(), where there is one.
// base_is_reference: as in LossRule. Model and precision are the session's to compare; learning rate, schedule and the
// number of steps may change.
std::string run_identity(const TrainOptions& options, std::uint64_t data, std::optional<std::uint64_t> teacher = {},
                         bool base_is_reference = false);

// Of what effective_configuration() says, but for --resume, --fresh and --go-back: it tells what one command left from
// what another did.
std::string configuration_hash(const std::string& effective);

// Where two commands, of which these are the effective_configuration(), would not have the same result: "--steps 3, not
// 6 and --lr ...", the first one's value first. Empty where only options differ that say how and where a run is done,
// what it shows and logs, or where --out is.
std::string other_result(const std::string& then, const std::string& now);

// Throws Exception (kind usage) that names what differs and says what to do.
void expect_same_run(const std::string& then, const std::string& now, const Folders& storage);

}  // namespace tierflow

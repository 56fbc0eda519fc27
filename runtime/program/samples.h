#pragma once
// `tierflow train --sample-every`: what the model writes, as far as it is trained, behind some prompts: the most likely
// token each time.
#include <cstdint>
#include <vector>

#include "runtime/data/data.h"
#include "runtime/program/options.h"
#include "runtime/program/training_log.h"
#include "runtime/session/generator.h"
#include "runtime/session/session.h"

namespace tierflow {

class Samples {
 public:
  // Reads the prompts, where the options name some, and makes tokens of them. Throws Exception.
  Samples(const TrainOptions& options, const ModelSpec& spec);

  // Sets aside what generation takes: keys and values of the host's budget, a workspace of the device's. Throws
  // Exception (kind usage) where there is too little, or for a prompt that the model cannot continue so far.
  void set_aside(SessionOptions& session, const ModelSpec& spec, TrainingLog& log) const;
  // After each step: where samples are due, makes them, shows them and puts them into the log. What keeps them from
  // being made is a warning, where the session stays intact; a signal leaves them out.
  void after_step(std::int64_t step, Session& session, TrainingLog& log) const;

 private:
  std::vector<Generated> generated(Session& session, TrainingLog& log) const;
  void show(std::int64_t step, const std::vector<Generated>& found, TrainingLog& log) const;

  const std::int64_t every_;  // 0: none
  DataOptions text_;          // tokenizer and interpreter, which run only while they are needed
  GenerationOptions generation_;
  std::vector<std::vector<std::int64_t>> prompts_;
};

}  // namespace tierflow

#pragma once
// `tierflow train --sample-every`: how the model of this moment continues some prompts. Each token is the most likely
// one.
#include <cstdint>
#include <vector>

#include "runtime/program/sample_prompts.h"
#include "runtime/program/training_log.h"
#include "runtime/session/generator.h"
#include "runtime/session/session.h"

namespace tierflow {

class Samples {
 public:
  explicit Samples(const SamplePrompts& prompts) : prompts_(prompts) {}  // which outlive this

  // After each step: where samples are due, makes them, shows them and puts them into the log. What keeps them from
  // being made is a warning, where the session stays intact; a signal leaves them out.
  void after_step(std::int64_t step, Session& session, TrainingLog& log) const;

 private:
  std::vector<Generated> generated(Session& session, TrainingLog& log) const;
  void show(std::int64_t step, const std::vector<Generated>& found, TrainingLog& log) const;

  const SamplePrompts& prompts_;  // a tokenizer runs only while it is needed
};

}  // namespace tierflow

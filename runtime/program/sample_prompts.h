#pragma once
// The prompts of `tierflow train --sample-every`, and what their samples take of a run's budgets. No torch here:
// `tierflow plan` counts them too.
#include <cstdint>
#include <vector>

#include "runtime/base/progress.h"
#include "runtime/data/data.h"
#include "runtime/planning/session_options.h"
#include "runtime/program/options.h"
#include "runtime/spec/generation_shape.h"

namespace tierflow {

class SamplePrompts {
 public:
  // Reads the prompts, where the options name some, and makes tokens of them. Throws Exception.
  SamplePrompts(const TrainOptions& options, const ModelSpec& spec);

  std::int64_t every() const { return every_; }      // steps; 0: there are no samples
  const DataOptions& text() const { return text_; }  // tokenizer and interpreter
  const GenerationOptions& generation() const { return generation_; }
  const std::vector<std::vector<std::int64_t>>& prompts() const { return prompts_; }

  // Tells the session what generation takes beside training: keys and values, for which its plan finds a place in RAM
  // or on storage, and a workspace of the device's budget. Throws Exception (kind usage) for a prompt that the model
  // cannot continue so far.
  void set_aside(SessionOptions& session, const ModelSpec& spec, const Say& say) const;

 private:
  const std::int64_t every_;
  DataOptions text_;
  GenerationOptions generation_;
  std::vector<std::vector<std::int64_t>> prompts_;
};

}  // namespace tierflow

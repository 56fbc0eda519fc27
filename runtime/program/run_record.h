#pragma once
// What a run remembers besides the session's state. It goes with every commit, so that a resumed run counts as one that
// was never stopped.
#include <cmath>
#include <cstdint>
#include <string>

namespace tierflow {

// The best of a run's evaluations, and how many in a row were no better, as transformers' EarlyStoppingCallback counts.
struct BestEvaluation {
  double loss = NAN;       // NaN before the first that is finite
  std::int64_t step = 0;   // 0: none
  std::int64_t since = 0;  // evaluations in a row that were not lower by more than the threshold

  void take(std::int64_t at_step, double found, double threshold);
};

struct RunRecord {
  std::string configuration;  // configuration_hash() of the command
  // --model, or the folder of --config, and --chat-template; absolute. Empty: none, or of an earlier version.
  std::string model, chat_template;
  std::int64_t skipped_in_a_row = 0;
  double held_out_before = NAN, last_loss = NAN;
  BestEvaluation best;                   // of the evaluations between steps
  std::int64_t evaluated = 0;            // the step of the last of these evaluations
  std::int64_t evaluated_sequences = 0;  // how many held-out sequences each of these evaluations takes
  std::int64_t exported = 0;             // the step whose model was last exported as the best; 0: none
  double exported_loss = NAN;

  std::string json() const;
  // Of json(), or of an earlier version's: what is not there is as at the beginning.
  static RunRecord parse(const std::string& json);
};

}  // namespace tierflow

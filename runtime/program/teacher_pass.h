#pragma once
// `tierflow eval --teacher-out`: what the model finds most likely at each position of all sequences, as a file that
// `tierflow train --distill` takes (data/teacher_file.h).
#include "runtime/data/data.h"
#include "runtime/data/teacher_file.h"
#include "runtime/models/layered_model.h"
#include "runtime/program/options.h"
#include "runtime/program/training_log.h"

namespace tierflow {

class TeacherPass {
 public:
  // Counts the positions, checks that the drive has room, and says how large the file will be. Throws Exception.
  TeacherPass(const EvalOptions& options, std::int64_t vocabulary, const Dataset& data, TrainingLog& log);
  // The next micro-batch of sequences, by number. Throws Exception (kind numeric) if logits are not finite.
  void add(const MicroBatch& batch, const HeadScores& scores);
  void finish(const Progress& progress);

 private:
  const std::int64_t top_, vocabulary_;
  const std::string model_;
  TeacherFileWriter file_;
};

}  // namespace tierflow

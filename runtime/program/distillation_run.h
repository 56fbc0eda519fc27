#pragma once
// The teacher's part of a run that distills: the file of its tokens (data/teacher_file.h), which is read as
// micro-batches need it.
#include <cstdint>
#include <optional>

#include "runtime/data/data.h"
#include "runtime/data/teacher_file.h"
#include "runtime/models/micro_batch.h"
#include "runtime/planning/session_options.h"
#include "runtime/program/options.h"

namespace tierflow {

class DistillationRun {
 public:
  // data outlives this. Throws Exception: usage for a file of other data or of a larger vocabulary; as TeacherFile.
  DistillationRun(const TrainOptions& options, std::int64_t vocabulary, const Dataset& data);

  // As TeacherFile::hash(); nothing without a teacher.
  std::optional<std::uint64_t> hash() const;
  // Sets what the session's loss needs to know.
  void tell(SessionOptions& session) const;
  // The teacher's tokens of training sequences from the `first` on. Throws Exception (corruption).
  void add_to(MicroBatch& batch, std::int64_t first) const;

 private:
  const Dataset& data_;
  std::optional<TeacherFile> file_;
};

}  // namespace tierflow

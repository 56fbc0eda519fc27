#pragma once
// Writes the scores of each row of the data in an evaluation, as lines of JSON in the order of the rows:
// {"document": 0, "tokens": 12, "loss": 1.25, "accuracy": 0.5}. tokens: those that are predicted and count.
#include <cstdint>
#include <filesystem>
#include <map>

#include "runtime/base/files.h"
#include "runtime/data/data.h"
#include "runtime/models/layered_model.h"

namespace tierflow {

class DocumentScores {
 public:
  // The file has its name when it is whole. Throws Exception if it cannot be made, and (kind usage) where something
  // that is no file has its name.
  DocumentScores(std::filesystem::path path, std::int64_t sequence_length);
  // A micro-batch of training sequences, from the `first` on, and what the head found of its tokens.
  void add(const Dataset& data, std::int64_t first, const MicroBatch& batch, const HeadScores& scores);
  void write();

 private:
  struct Sum {
    std::int64_t tokens = 0, hits = 0;
    double loss = 0;
  };

  const std::filesystem::path path_;
  const std::int64_t length_;
  const File file_;
  std::map<std::int64_t, Sum> sums_;
};

}  // namespace tierflow

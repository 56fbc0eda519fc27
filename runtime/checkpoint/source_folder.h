#pragma once
// The model folder that a model and a result come from: which of its tensors belong to the language model, and what
// else it has. The other parts are not trained and are copied to a result unchanged: towers and projectors of
// multimodal models, and layers that predict several tokens at once (GLM-4.5).
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "runtime/base/progress.h"
#include "runtime/checkpoint/safetensors.h"
#include "runtime/spec/model_spec.h"

namespace tierflow {

// Throws Exception (kind input) listing up to ten tensors that are missing, superfluous, or of the wrong shape or type.
void check_tensors(const ModelSpec& spec, const Checkpoint& checkpoint,
                   const std::string& described_by = "config.json");

class SourceFolder {
 public:
  // spec: of the folder's config.json.
  SourceFolder(const ModelSpec& spec, std::shared_ptr<const Checkpoint> checkpoint);

  // Whether a result copies anything from the folder: other tensors, or the names and the config.json of a class that
  // wraps the language model.
  bool gives() const { return wraps_ || !others_.empty(); }
  const std::filesystem::path& folder() const { return checkpoint_->folder(); }
  // The name in a result of a tensor of the language model.
  std::string name_of(const TensorSpec& tensor) const;
  const std::string& config_json() const { return config_json_; }
  // The other tensors in the order of write(), and their size. Tensors that the folder stores quantised are written as
  // bf16.
  std::vector<TensorHeader> headers() const;
  std::uint64_t bytes() const;
  // XXH3 of config_json(), headers() and what write() writes.
  std::uint64_t hash(const Progress& progress = {}) const;
  // Writes the other tensors, streamed. Throws Exception (kind input) if they do not have that hash.
  void write(CheckpointWriter& writer, std::optional<std::uint64_t> hash, const Progress& progress = {}) const;

 private:
  std::uint64_t read(const char* phase, const Progress& progress,
                     const std::function<void(std::span<const std::byte>)>& take) const;

  const std::shared_ptr<const Checkpoint> checkpoint_;
  const bool wraps_;
  const std::string config_json_;
  std::vector<std::string> others_;  // names in the files
};

}  // namespace tierflow

#pragma once
// Writes the model of a durable Python script from a commit: in `tierflow export` when the script has ended, and in the
// script itself while it trains. Throws Exception.
//
// What lies beside each commit (a safetensors file, its bytes here) has the tensors that do not stream, parameters and
// buffers as "model.NAME", and in its metadata under "result" what a script knows of its model, as JSON:
//   {"adapter": whether it is a folder of PEFT's,
//    "files": {NAME: TEXT}, config.json or adapter_config.json among them where there is one,
//    "folder": where the tokenizer is; may be absent,
//    "streamed": [[[[NAME, SHAPE], ...] of a tensor, ...] of a unit, ...],
//    "beside": {NAME: [[NAME, SHAPE], ...]}}
// or {"why": TEXT} where the script alone can write it as save_pretrained() does.
#include <cstddef>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "runtime/base/progress.h"
#include "runtime/planning/stored_model.h"
#include "runtime/state/saved_parts.h"
#include "runtime/state/streamed_state.h"

namespace tierflow {

class ScriptModel {
 public:
  // beside: the verified bytes of a commit. units: what streams. where: named in the error if the bytes are not what a
  // script writes.
  ScriptModel(std::string beside, const std::vector<UnitSpec>& units, const std::string& where);

  // The folder's last file: config.json or adapter_config.json; empty if the model has neither.
  const std::string& last_file() const { return last_file_; }
  // A sentence that says what is not as save_pretrained() would write it; empty: everything is.
  const std::string& remark() const { return remark_; }
  // Whether any streamed tensor is a part of it.
  bool has_streamed() const;
  // Writes the folder, each file flushed before it has its name, the last file last. read: of the commit. Returns the
  // name of the first streamed tensor that holds an infinity or no number; empty: none does.
  std::string write(const std::vector<UnitSpec>& units, const PackedModel& packed, const swap::Layout& layout,
                    const std::filesystem::path& folder, const ReadChunk& read, const Progress& progress,
                    const BeforeMove& before_move = {}) const;

 private:
  struct Source {
    std::string dtype;
    std::span<const std::byte> bytes;
    std::vector<SavedPart> parts;
  };
  void read_result(const std::string& result, const std::vector<UnitSpec>& units,
                   std::map<std::string, Source>& ordinary);
  // Under the names that everything has in the script.
  void name_plainly(const std::vector<UnitSpec>& units);

  const std::string beside_;
  std::vector<std::pair<std::string, std::string>> files_;  // but the last one
  std::string last_file_, last_text_, remark_;
  std::filesystem::path folder_;
  SavedParts streamed_;
  std::vector<Source> ordinary_;  // those that are saved
};

// That of a store; nothing if a session made it.
std::optional<ScriptModel> script_in(const StoredModel& model, const Folders& storage);

}  // namespace tierflow

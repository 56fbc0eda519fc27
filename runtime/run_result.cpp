#include "runtime/run_result.h"

#include <fstream>

#include "runtime/exception.h"
#include "runtime/train.h"
#include "runtime/training_log.h"

namespace tierflow {

namespace fs = std::filesystem;

void check_out(const fs::path& out) {
  std::error_code ignored;
  if (fs::exists(out, ignored) && !(fs::is_directory(out, ignored) && fs::is_empty(out, ignored)))
    throw Exception(io::Error{.kind = io::ErrorKind::usage,
                              .path = out.string(),
                              .detail = "--out exists and is not an empty folder: name another, or remove it"});
}

void write_result_folder(Session& session, const TrainOptions& options, const Progress& progress) {
  session.export_hf(options.out, progress);
  const fs::path from = options.config.empty() ? options.model : options.config.parent_path();
  for (const char* name : {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json",
                           "merges.txt", "tokenizer.model", "generation_config.json"}) {
    std::error_code ignored;
    if (fs::exists(from / name, ignored))
      fs::copy_file(from / name, options.out / name, fs::copy_options::overwrite_existing, ignored);
  }
  std::ofstream(options.out / "tierflow_run.json") << effective_configuration(options) << '\n';
}

int run_export(const ExportOptions& options) {
  check_out(options.out);
  TrainingLog log({}, false);
  export_store(options.storage, options.out,
               [&](const char* phase, std::uint64_t done, std::uint64_t total) { log.progress(phase, done, total); });
  log.say("result: " + fs::absolute(options.out).string());
  return 0;
}

}  // namespace tierflow

#include "runtime/program/machine_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <thread>

#include "runtime/base/exception.h"
#include "runtime/base/files.h"
#include "runtime/program/option_values.h"

namespace tierflow {
namespace {

// Two names of one folder, by links or dots too.
void check_storage(const RunOptions& o) {
  std::map<std::filesystem::path, std::filesystem::path> seen;
  for (const auto& folder : o.storage) {
    std::error_code ignored;
    auto real = std::filesystem::weakly_canonical(std::filesystem::absolute(folder, ignored), ignored);
    if (!real.has_filename()) real = real.parent_path();  // a slash at the end
    const auto [before, is_new] = seen.emplace(real, folder);
    if (!is_new && before->second == folder)
      fail_usage(fmt::format("--storage names {} twice", printable(folder.string())));
    if (!is_new)
      fail_usage(fmt::format("--storage names one folder twice: {} and {}", printable(before->second.string()),
                             printable(folder.string())));
  }
}

void check_threads(int threads) {
  const int cpus = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  if (threads > std::max(64, 4 * cpus))
    fail_usage(fmt::format("--threads is {}; this machine has {} CPUs: give at most {}, or 0 for all of them", threads,
                           cpus, std::max(64, 4 * cpus)));
}

}  // namespace

void add_machine_rows(OptionTable& table, RunOptions& o) {
  table.group(kMachine);
  table.choice("device", o.device, {"auto", "cpu", "cuda"}, "where to compute");
  table.bytes("device-memory", o.device_memory,
              "budget for weights, gradients, activations and workspace on the device");
  table.bytes("host-memory", o.host_memory, "budget for pinned buffers and resident state");
  table.paths("storage", o.storage, true,
              "folders for the training state, on NVMe, one a drive; none: all in host memory");
  table.choice("engine", o.engine, {"auto", "io_uring", "libaio", "threads"}, "how storage is read and written");
  table.integer("threads", o.threads, 0, "CPU threads; 0: all");
  table.flag("allow-buffered", o.allow_buffered,
             "use storage whose file system has no O_DIRECT, through the page cache");
  table.flag("allow-any-filesystem", o.allow_any_filesystem, "use storage on a network, overlay or memory file system");
  table.flag("fresh", o.fresh, "discard what an earlier run left in the storage folders");
  table.for_one_run();
}

void check_machine(const RunOptions& o) {
  if (o.fresh && o.storage.empty()) fail_usage("--fresh is for --storage: no state lies anywhere else");
  check_storage(o);
  check_threads(o.threads);
}

io::EngineKind engine_kind(const std::string& name) {
  for (const io::EngineKind kind : {io::EngineKind::io_uring, io::EngineKind::libaio, io::EngineKind::threads})
    if (name == io::engine_name(kind)) return kind;
  return io::EngineKind::automatic;
}

}  // namespace tierflow

#include "runtime/program/bench_command.h"

#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <iostream>
#include <thread>

#include "io/bench.h"
#include "optim/bench.h"
#include "runtime/base/exception.h"
#include "runtime/program/command_line.h"
#include "runtime/program/options.h"

namespace tierflow {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kBytesPerElement = 15;  // of the largest state that is measured

OptionTable storage_table(BenchStorageOptions& o) {
  OptionTable table("bench storage");
  table.paths("dir", o.folders, true, "folders on the drives to measure, one a drive; made and removed if missing");
  table.bytes("size", o.size, "of the file; over several folders, of all files together");
  table.bytes("block", o.block, "of one request");
  table.integer("depth", o.depth, 1, "requests in flight at each drive");
  table.choice("engine", o.engine, {"auto", "io_uring", "libaio", "threads"}, "auto: each one that works here");
  table.choice("measure", o.measure, {"all", "write", "read", "mixed"}, "what to measure");
  table.number("seconds", o.seconds, 0, 86400, "go over the file again until so much time has passed; 0: once");
  table.flag("keep", o.keep, "leave the file for the next measurement, which then need not fill it");
  table.flag("allow-buffered", o.allow_buffered, "measure through the page cache where O_DIRECT is refused");
  table.flag("allow-any-filesystem", o.allow_any_filesystem, "measure network, overlay and memory file systems too");
  table.flag("json", o.json, "one JSON object a line in place of the table");
  return table;
}

OptionTable optimizer_table(BenchOptimizerOptions& o) {
  OptionTable table("bench optimizer");
  table.integer("elements", o.elements, 4096, "parameters to update");
  table.integer("threads", o.threads, 0, "0: as many as the machine has");
  table.integer("repeats", o.repeats, 1, "runs of which the median counts");
  table.text("only", o.only, "kernels whose name contains this");
  table.flag("peers", o.peers,
             "also torch, DeepSpeed, bitsandbytes and torchao, where Python has them; from the source tree");
  table.flag("json", o.json, "one JSON object a line in place of the table");
  return table;
}

// A live line on a terminal, nothing elsewhere: the results themselves show where it is.
class BenchProgress {
 public:
  explicit BenchProgress(bool shown) : shown_(shown && isatty(STDERR_FILENO) == 1) {}
  ~BenchProgress() { clear(); }
  void show(const std::string& what) const {
    if (shown_) std::cerr << "\r\033[K" << what << " ..." << std::flush;
  }
  void clear() const {
    if (shown_) std::cerr << "\r\033[K" << std::flush;
  }

 private:
  const bool shown_;
};

void storage_row(const io::BenchResult& result) {
  const auto rate = [](double gb_s) { return gb_s > 0 ? fmt::format("{:.2f}", gb_s) : std::string("-"); };
  const auto latency = [](const io::Latency& l) {
    if (l.count == 0) return std::string("-");
    const auto ms = [](std::chrono::nanoseconds time) { return 1e-6 * static_cast<double>(time.count()); };
    return fmt::format("{:.2f} / {:.2f}", ms(l.p50), ms(l.p99));
  };
  std::vector<std::string> folders;
  for (const fs::path& folder : result.folders) folders.push_back(folder.string());
  std::cout << fmt::format("{:9} {:7} {:>9} {:>9} {:>9}  {:>16}  {:>16}  {}", io::engine_name(result.engine),
                           result.direct ? "yes" : "NO", rate(result.read_gb_s), rate(result.write_gb_s),
                           rate(result.mixed_gb_s), latency(result.read_latency), latency(result.write_latency),
                           fmt::join(folders, ","))
            << std::endl;
}

void optimizer_row(const optim::BenchLine& line) {
  std::cout << fmt::format("{:34} {:>9.0f} {:>9.2f} {:>12}", line.name, line.mparam_s, line.stream_share,
                           line.bytes_per_parameter)
            << std::endl;
}

// Runs peers.py of the source tree on the optimizer that lies beside this program.
void run_peers(const BenchOptimizerOptions& options, int threads) {
  const fs::path source = TIERFLOW_SOURCE_DIR, script = source / "benchmarks/optimizer/peers.py";
  std::error_code ignored;
  const fs::path build = fs::read_symlink("/proc/self/exe", ignored).parent_path();
  if (!fs::exists(script, ignored) || !fs::exists(build / "libtierflow_optim_c.so", ignored))
    fail(io::ErrorKind::environment, "--peers",
         "works in the source tree alone: run `make build`, then `.venv/bin/python benchmarks/optimizer/peers.py "
         "--build build` there, with torch in that Python, and deepspeed, bitsandbytes, torchao as you want them");
  const std::string python = fs::exists(TIERFLOW_PYTHON, ignored) ? TIERFLOW_PYTHON : "python3";
  std::vector<std::string> words = {python,       script.string(),
                                    "--build",    build.string(),
                                    "--elements", std::to_string(options.elements),
                                    "--threads",  std::to_string(threads),
                                    "--repeats",  std::to_string(options.repeats)};
  if (options.json) words.emplace_back("--json");
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  pid_t child = 0;
  if (const int number = posix_spawnp(&child, python.c_str(), nullptr, nullptr, arguments.data(), environ); number != 0)
    fail_system("run", python, number);
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
    fail(io::ErrorKind::environment, script.string(), "failed; what it says stands above");
}

}  // namespace

BenchStorageOptions parse_bench_storage(const std::vector<std::string>& words) {
  BenchStorageOptions options;
  const OptionTable table = storage_table(options);
  CommandLine(table).apply(words);
  const auto refuse = [](const std::string& detail) { fail(io::ErrorKind::usage, "", detail); };
  if (options.folders.empty()) refuse("`tierflow bench storage` needs --dir");
  if (options.block == 0 || options.block % 4096 != 0 || options.block > std::uint64_t{1} << 30)
    refuse("--block must be a multiple of 4096 and at most 1GiB");
  if (options.size < options.block) refuse("--size must be at least one --block");
  auto sorted = options.folders;
  std::sort(sorted.begin(), sorted.end());
  if (const auto twice = std::adjacent_find(sorted.begin(), sorted.end()); twice != sorted.end())
    refuse("--dir names " + twice->string() + " twice");
  return options;
}

BenchOptimizerOptions parse_bench_optimizer(const std::vector<std::string>& words) {
  BenchOptimizerOptions options;
  const OptionTable table = optimizer_table(options);
  CommandLine(table).apply(words);
  const std::int64_t most = static_cast<std::int64_t>(sysconf(_SC_PHYS_PAGES)) * getpagesize() / 2 / kBytesPerElement;
  if (options.elements > most)
    fail(io::ErrorKind::usage, "", fmt::format("--elements must be at most {}: half of the memory", most));
  return options;
}

std::string bench_help(const std::string& what, std::size_t columns) {
  BenchStorageOptions storage;
  BenchOptimizerOptions optimizer;
  if (what == "storage") {
    const OptionTable table = storage_table(storage);
    return CommandLine(table).help(columns);
  }
  if (what == "optimizer") {
    const OptionTable table = optimizer_table(optimizer);
    return CommandLine(table).help(columns);
  }
  return "Usage: tierflow bench storage --dir DIR[,DIR...] [OPTIONS]\n"
         "       tierflow bench optimizer [OPTIONS]\n"
         "\n"
         "  storage    read, write and mixed bandwidth and latency of folders, with each engine\n"
         "  optimizer  parameters a second of each update kernel, beside a memory stream of the same pattern\n"
         "\n"
         "tierflow bench storage --help and tierflow bench optimizer --help list the options.\n";
}

void bench_storage(const BenchStorageOptions& options, const std::function<bool()>& stop) {
  // A reader that goes away must not end the process before its files are removed.
  std::signal(SIGPIPE, SIG_IGN);
  const BenchProgress progress(true);
  io::BenchOptions bench;
  bench.folders = options.folders;
  bench.bytes = options.size;
  bench.block = options.block;
  bench.depth = static_cast<unsigned>(options.depth);
  bench.engine = engine_kind(options.engine);
  const auto wanted = [&](const char* phase) { return options.measure == "all" || options.measure == phase; };
  bench.write = wanted("write");
  bench.read = wanted("read");
  bench.mixed = wanted("mixed");
  bench.seconds = options.seconds;
  bench.keep = options.keep;
  bench.allow_buffered = options.allow_buffered;
  bench.allow_any_filesystem = options.allow_any_filesystem;
  bench.stop = [&stop] { return stop() || !std::cout; };
  bench.progress = [&progress](const std::string& phase) { progress.show(phase); };
  if (!options.json)
    std::cout << fmt::format("{:9} {:7} {:>9} {:>9} {:>9}  {:>16}  {:>16}  {}\n", "engine", "direct", "read GB/s",
                             "write", "mixed", "read ms p50/p99", "write ms p50/p99", "folders");
  std::vector<std::string> warnings;
  const io::Error error = io::bench_engines(bench, [&](const io::BenchResult& result) {
    progress.clear();
    if (options.json)
      std::cout << result.json() << std::endl;
    else
      storage_row(result);
    for (const std::string& warning : result.warnings) {
      if (std::find(warnings.begin(), warnings.end(), warning) != warnings.end()) continue;
      warnings.push_back(warning);
      std::cerr << "warning: " << warning << std::endl;
    }
  });
  if (!std::cout) fail(io::ErrorKind::io, "standard output", "cannot be written any more");
  throw_if(error);
}

void bench_optimizer(const BenchOptimizerOptions& options) {
  const int threads =
      options.threads > 0 ? options.threads : static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  if (!options.json)
    std::cout << fmt::format("{:34} {:>9} {:>9} {:>12}", "kernel", "Mparam/s", "of stream", "bytes/param") << std::endl;
  bool any = false;
  {
    const BenchProgress progress(true);
    progress.show(fmt::format("{} parameters, {} threads", options.elements, threads));
    optim::bench_optimizer({.elements = static_cast<std::size_t>(options.elements),
                            .threads = threads,
                            .repeats = options.repeats,
                            .only = options.only},
                           [&](const optim::BenchLine& line) {
                             progress.clear();
                             any = true;
                             if (options.json)
                               std::cout << optim::json_of(line) << std::endl;
                             else
                               optimizer_row(line);
                           });
  }
  if (!any) fail(io::ErrorKind::usage, "", "--only fits the name of no kernel; without it all are shown");
  if (options.peers) run_peers(options, threads);
}

}  // namespace tierflow

// The program `tierflow`. Errors are one line on standard error; the exit code is that of docs/errors.md.
#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <iostream>
#include <new>
#include <string>
#include <system_error>
#include <vector>

#include "runtime/base/exception.h"
#include "runtime/base/files.h"
#include "runtime/base/signals.h"
#include "runtime/base/terminal.h"
#include "runtime/checkpoint/init.h"
#include "runtime/program/bench_command.h"
#include "runtime/program/data_command.h"
#include "runtime/program/plan_command.h"
#include "runtime/program/store_command.h"
#include "runtime/program/train.h"
#include "runtime/program/train_library.h"

namespace tierflow {
namespace {

constexpr const char* usage =
    "Tierflow trains language models larger than the GPU and larger than memory,\n"
    "with their state on NVMe.\n"
    "\n"
    "Usage: tierflow COMMAND [OPTIONS]\n"
    "\n"
    "  init     make a model folder with random weights from a config.json\n"
    "  train    train a model on text or chats, and write a Hugging Face folder\n"
    "  plan     say what training would take of memory, storage and time\n"
    "  data     prepare rows of conversations, or preview what is trained on\n"
    "  eval     print the loss and perplexity of a model on text\n"
    "  generate continue prompts, or talk, with a model and its adapters\n"
    "  merge    add adapters to their model, and write it whole\n"
    "  export   write what a training run left in its store as a model folder\n"
    "  status   say what a training run left in its storage folders\n"
    "  verify   read all of it and compare every checksum\n"
    "  bench    measure the drives (bench storage) and the update (bench optimizer)\n"
    "\n"
    "tierflow help COMMAND lists its options. Exit codes: docs/errors.md\n";

void* load_train_library() {
  const std::filesystem::path path = train_library();
  if (void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL); library != nullptr) return library;
  const char* reason = dlerror();
  fail(io::ErrorKind::environment, path.string(),
       "cannot be loaded: " + printable(reason == nullptr ? "" : reason, 300));
}

template <class Options>
int call(const char* name, const Options& options) {
  // Waiting threads sleep: torch's team shares the cores with the update, the copies and the drives. Read when libgomp
  // is loaded.
  setenv("OMP_WAIT_POLICY", "passive", /*overwrite=*/0);
  // Of torch's CUDA allocator, whose cap counts what lies between tensors too. A setting by its other name, for CUDA
  // alone, comes before this one.
  setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True", /*overwrite=*/0);
  void* entry = dlsym(load_train_library(), name);
  if (entry == nullptr)
    fail(io::ErrorKind::environment, name, "is not in libtierflow_train.so: it is of another version");
  return reinterpret_cast<int (*)(const Options*)>(entry)(&options);
}

// Names in options may be relative to it.
void check_working_folder() {
  std::error_code error;
  const std::filesystem::path folder = std::filesystem::current_path(error);
  if (error || folder.empty())
    fail(io::ErrorKind::environment, "the working folder",
         "cannot be read (" + error.message() + "): change into one that exists, with cd");
}

int run_bench(const std::vector<std::string>& words, bool help) {
  const std::string what = words.empty() ? "" : words[0];
  if (help) {
    std::cout << bench_help(what, columns_of(STDOUT_FILENO));
    return 0;
  }
  if (what != "storage" && what != "optimizer")
    fail(io::ErrorKind::usage, "",
         "`tierflow bench` measures storage or optimizer, not \"" + printable(what) + "\"; see tierflow bench --help");
  const std::vector<std::string> rest(words.begin() + 1, words.end());
  if (what == "optimizer") {
    bench_optimizer(parse_bench_optimizer(rest));
    return 0;
  }
  const BenchStorageOptions options = parse_bench_storage(rest);
  watch_signals();
  bench_storage(options, [] { return stop_signal() != 0; });
  return 0;
}

int run_data(const std::vector<std::string>& words, bool help) {
  const std::string what = words.empty() ? "" : words[0];
  const bool known = what == "prepare" || what == "preview";
  if (help) {
    for (const char* command : {"prepare", "preview"})
      if (!known || what == command)
        std::cout << help_of(std::string("data ") + command, columns_of(STDOUT_FILENO)) << (known ? "" : "\n");
    if (!known) std::cout << "The formats of rows, with an example of each: docs/data.md\n";
    return 0;
  }
  if (!known)
    fail(io::ErrorKind::usage, "",
         "`tierflow data` does prepare or preview, not \"" + printable(what) + "\"; see tierflow data --help");
  const DataCommandOptions options = parse_data_command(what, {words.begin() + 1, words.end()});
  return what == "prepare" ? run_data_prepare(options) : run_data_preview(options);
}

bool asks_for_help(const std::string& word) {
  return word == "--help" || word == "-h";
}

int run(std::vector<std::string> words) {
  // `tierflow help train` and `tierflow train --help` are one.
  if (words.size() > 1 && words[0] == "help") {
    words.erase(words.begin());
    words.emplace_back("--help");
  }
  if (words.empty() || asks_for_help(words[0]) || words[0] == "help") {
    (words.empty() ? std::cerr : std::cout) << usage;
    return words.empty() ? static_cast<int>(io::ErrorKind::usage) : 0;
  }
  if (words[0] == "--version") {
    std::cout << "tierflow " TIERFLOW_VERSION "\n";
    return 0;
  }
  const std::string& command = words[0];
  if (command != "init" && command != "train" && command != "plan" && command != "data" && command != "eval" &&
      command != "export" && command != "generate" && command != "merge" && command != "status" &&
      command != "verify" && command != "bench")
    fail(io::ErrorKind::usage, "",
         "unknown command \"" + printable(command) +
             "\"; commands are init, train, plan, data, eval, generate, export, merge, status, verify, bench");
  const std::vector<std::string> rest(words.begin() + 1, words.end());
  const bool help = std::any_of(rest.begin(), rest.end(), asks_for_help);
  if (!help) {
    check_working_folder();
    std::signal(SIGPIPE, SIG_IGN);  // a result that nobody reads is an error; help is not
  }
  if (command == "bench") return run_bench(rest, help);
  if (command == "data") return run_data(rest, help);
  if (help) {
    std::cout << help_of(command, columns_of(STDOUT_FILENO));
    return 0;
  }
  if (command == "train") return call("tierflow_run_train", parse_train(rest));
  if (command == "plan")
    return run_plan(parse_plan(rest), [](const ProfileJob& job) { call("tierflow_run_profile", job); });
  if (command == "eval") return call("tierflow_run_eval", parse_eval(rest));
  if (command == "generate") return call("tierflow_run_generate", parse_generate(rest));
  if (command == "status") return run_status(parse_store_command(command, rest));
  if (command == "verify") return run_verify(parse_store_command(command, rest));
  if (command == "merge") return call("tierflow_run_merge", parse_merge(rest));
  if (command == "export") return call("tierflow_run_export", parse_export(rest));
  const InitOptions options = parse_init(rest);
  watch_signals();
  init_checkpoint(
      options.config, options.out, options.seed, options.shard_size, [] { return stop_signal() != 0; },
      options.read_as);
  return 0;
}

int report(const std::string& line, int code) {
  std::cout.flush();
  std::fprintf(stderr, "tierflow: %s\n", line.c_str());
  return code;
}

int code_of(const Exception& error) {
  if (const auto* stopped = dynamic_cast<const Stopped*>(&error)) return 128 + stopped->signal();
  if (error.error().kind == io::ErrorKind::cancelled && stop_signal() != 0) return 128 + stop_signal();
  return static_cast<int>(error.error().kind);
}

// What a command prints is its result: half of it is none.
int checked_output(int code) {
  std::cout.flush();
  if (code != 0 || std::cout) return code;
  return report("standard output cannot be written: the result is not whole", static_cast<int>(io::ErrorKind::io));
}

int code_of_command(int argc, char** argv) {
  try {
    return checked_output(run({argv + 1, argv + argc}));
  } catch (const Exception& error) {
    return report(error.what(), code_of(error));
  } catch (const std::bad_alloc&) {
    return report("memory ran out", static_cast<int>(io::ErrorKind::memory));
  } catch (const std::filesystem::filesystem_error& error) {
    return report(printable(error.what(), 500), static_cast<int>(io::ErrorKind::environment));
  } catch (const std::exception& error) {
    return report("internal error: " + printable(error.what(), 500), 1);
  }
}

}  // namespace
}  // namespace tierflow

namespace {

// Where a standard stream is closed, the next file or socket would get its number, and what is printed would go there.
// Writing to what takes its place is still an error.
void occupy_standard_streams() {
  int taken = 0;
  do taken = open("/dev/null", O_RDONLY);
  while (taken >= 0 && taken <= STDERR_FILENO);
  if (taken >= 0) close(taken);
}

}  // namespace

int main(int argc, char** argv) {
  occupy_standard_streams();
  const int code = tierflow::code_of_command(argc, argv);
#ifdef __SANITIZE_ADDRESS__
  return code;  // leaks are looked for after destructors
#else
  // Everything of this program has ended. LibTorch's registries, taken down one by one, would take 0.1 s.
  std::fflush(nullptr);
  std::quick_exit(code);
#endif
}

#include "runtime/program/store_command.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <iostream>
#include <nlohmann/json.hpp>

#include "io/descriptor.h"
#include "io/lock_holder.h"
#include "runtime/base/exception.h"
#include "runtime/base/machine.h"
#include "runtime/base/seconds.h"
#include "runtime/base/signals.h"
#include "runtime/planning/reference_file.h"
#include "runtime/planning/stored_model.h"

namespace tierflow {
namespace {

using Clock = std::chrono::steady_clock;

LeftStore store_in(const Folders& storage) {
  LeftStore left = find_left_store(storage);
  if (!left.there) fail(io::ErrorKind::input, storage.front().string(), "holds no state of a training run");
  return left;
}

// state: the data file in one of the folders.
std::uint64_t bytes_in(const Folders& storage, const std::filesystem::path& state) {
  std::uint64_t bytes = 0;
  for (const std::filesystem::path& folder : storage) {
    std::error_code ignored;
    const auto size = std::filesystem::file_size(folder / state.filename(), ignored);
    if (!ignored) bytes += size;
  }
  return bytes;
}

// The process that holds the data file and still runs; 0 where there is none, or the kernel does not say.
pid_t holder_of(const std::filesystem::path& state) {
  const io::Descriptor file(open(state.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  const pid_t holder = file ? io::lock_holder(file.fd()) : 0;
  return holder > 0 && (kill(holder, 0) == 0 || errno == EPERM) ? holder : 0;
}

// Nothing is read of a state that a run is writing.
int say_held(const StoreCommandOptions& options, const std::filesystem::path& state, pid_t holder) {
  const std::uint64_t bytes = bytes_in(options.storage, state);
  const std::string reason = fmt::format("process {} trains with it now", holder);
  if (options.json)
    std::cout << nlohmann::ordered_json{{"state", state.string()}, {"bytes", bytes},    {"process", holder},
                                        {"readable", nullptr},     {"step", nullptr},   {"generation", nullptr},
                                        {"generations", nullptr},  {"age_s", nullptr},  {"resumable", false},
                                        {"reason", reason},        {"made_by", nullptr}}
                     .dump(2)
              << "\n";
  else
    std::cout << fmt::format("{} on storage: {}\n", human_bytes(bytes), reason);
  return 0;
}

// Why no run goes on with it; empty where one does.
std::string why_not_resumable(const LeftStore& left) {
  if (!left.readable) return left.line;
  return left.resumable || left.streamed ? "" : "it was made without --durability";
}

std::string age_text(std::int64_t seconds) {
  if (seconds < 120) return fmt::format("{} s", seconds);
  if (seconds < 120 * 60) return fmt::format("{} min", seconds / 60);
  if (seconds < 48 * 3600) return fmt::format("{} h", seconds / 3600);
  return fmt::format("{} days", seconds / (24 * 3600));
}

// From the third second on, a line on standard error that is written over.
class Shown {
 public:
  ~Shown() {
    if (shown_) std::fputs("\n", stderr);
  }
  void operator()(std::uint64_t done, std::uint64_t total) {
    throw_if_stopped();
    const auto now = Clock::now();
    if (now - last_ < std::chrono::seconds(2)) return;
    last_ = now;
    shown_ = true;
    const double seconds = std::chrono::duration<double>(now - begun_).count();
    std::fputs(fmt::format("\rverified {} of {}, {} a second ", human_bytes(done), human_bytes(total),
                           human_bytes(static_cast<std::uint64_t>(static_cast<double>(done) / seconds)))
                   .c_str(),
               stderr);
  }

 private:
  const Clock::time_point begun_ = Clock::now();
  Clock::time_point last_ = begun_;
  bool shown_ = false;
};

}  // namespace

int run_status(const StoreCommandOptions& options) {
  LeftStore left;
  try {
    left = store_in(options.storage);
  } catch (const Exception& refused) {
    const std::filesystem::path state = refused.error().path;
    const pid_t holder = refused.error().kind == io::ErrorKind::locked ? holder_of(state) : 0;
    if (holder == 0) throw;
    return say_held(options, state, holder);
  }
  const std::uint64_t bytes = bytes_in(options.storage, left.state);
  const std::string reason = why_not_resumable(left);
  const std::int64_t age = std::max<std::int64_t>(0, std::time(nullptr) - left.written);
  if (options.json) {
    nlohmann::ordered_json object{
        {"state", left.state.string()},
        {"bytes", bytes},
        {"process", nullptr},
        {"readable", left.readable},
        {"step", left.step},
        {"generation", left.generation},
        {"generations", left.generations},
        {"age_s", age},
        {"resumable", reason.empty()},
        {"reason", reason.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(reason)},
        {"made_by", left.owner}};
    if (!left.run.empty()) object["run"] = nlohmann::ordered_json::parse(left.run, nullptr, false);
    std::cout << object.dump(2) << "\n";
    return 0;
  }
  std::cout << fmt::format("{} on storage, of {}\n", human_bytes(bytes), left.owner);
  if (!left.readable) {
    std::cout << left.state.string() << " " << left.line << "\n";
    return 0;
  }
  std::cout << fmt::format("state after step {}\n", left.step)
            << fmt::format("generation {}, {} kept; last written {} ago\n", left.generation,
                           left.generations == 1 ? "the only one that is" : "the newest of 2 that are", age_text(age))
            << (left.streamed    ? "the script that made it goes on with it\n"
                : left.resumable ? "the same `tierflow train` command goes on with it\n"
                                 : "no run goes on with it: " + reason + "\n");
  if (!left.streamed) std::cout << export_command(options.storage) << " writes it as a model folder\n";
  return 0;
}

int run_verify(const StoreCommandOptions& options) {
  watch_signals();
  const LeftStore left = store_in(options.storage);
  if (!left.readable) fail(io::ErrorKind::corruption, left.state.string(), left.line);
  const StoredModel model = open_stored_model(options.storage);
  const auto begun = Clock::now();
  std::uint64_t bytes = 0;
  {
    Shown shown;
    throw_if(model.store->verify_all([&](std::uint64_t done, std::uint64_t total) {
      bytes = total;
      shown(done, total);
    }));
  }
  verify_reference(options.storage, left);
  const double seconds = seconds_since(begun);
  if (options.json)
    std::cout << nlohmann::ordered_json{{"step", left.step},
                                        {"generation", model.store->generation()},
                                        {"bytes", bytes},
                                        {"seconds", seconds},
                                        {"whole", true}}
                     .dump(2)
              << "\n";
  else
    std::cout << fmt::format("whole: the state after step {}, {} verified in {:.1f} s\n", left.step, human_bytes(bytes),
                             seconds);
  return 0;
}

}  // namespace tierflow

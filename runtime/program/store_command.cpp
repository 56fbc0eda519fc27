#include "runtime/program/store_command.h"

#include <fcntl.h>
#include <fmt/format.h>

#include <algorithm>
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
using Json = nlohmann::ordered_json;

std::string may_be_older(const LeftStore& left) {
  return left.passed_over.empty() ? "" : "it may not be the newest that was committed: " + left.passed_over + "\n";
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
  const io::LockHolder holder = file ? io::lock_holder(file.fd()) : io::LockHolder{};
  return holder.ended ? 0 : holder.process;
}

// That no process trains with, as verifying takes.
LeftStore free_store_in(const Folders& storage) {
  try {
    return expect_left_store(storage);
  } catch (const Exception& refused) {
    if (refused.error().kind != io::ErrorKind::locked) throw;
    fail_with_more(refused.error(), "`tierflow status` shows how far it is");
  }
}

// Why no run goes on with it; empty where one does.
std::string why_not_resumable(const LeftStore& left) {
  if (!left.readable) return left.line;
  return left.resumable || left.streamed ? "" : "it was made without --durability";
}

std::string who_goes_on(const LeftStore& left) {
  if (left.streamed) return "the script that made it goes on with it";
  return fmt::format(
      "{} goes on with it, if it is whole, which `tierflow verify` finds out",
      is_of_train(left.run) ? "the same `tierflow train` command" : "the script or program that made it");
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
  pid_t holder = 0;
  try {
    left = expect_left_store(options.storage);
  } catch (const Exception& refused) {
    if (refused.error().kind == io::ErrorKind::locked) holder = holder_of(refused.error().path);
    if (holder == 0) throw;
    left = find_left_store(options.storage, Held::is_read);
    if (!left.there) throw;  // it ended just now, and its state with it
  }
  const std::uint64_t bytes = bytes_in(options.storage, left.state);
  const std::string reason =
      holder != 0 ? fmt::format("process {} trains with it now", holder) : why_not_resumable(left);
  const std::int64_t age = std::max<std::int64_t>(0, std::time(nullptr) - left.written);
  if (options.json) {
    const auto of_state = [&](auto value) { return left.readable || holder == 0 ? Json(value) : Json(); };
    Json object{{"state", left.state.string()},
                {"bytes", bytes},
                {"process", holder != 0 ? Json(holder) : Json()},
                {"readable", left.readable},
                {"step", of_state(left.step)},
                {"generation", of_state(left.generation)},
                {"generations", of_state(left.generations)},
                {"passed_over", left.passed_over.empty() ? Json() : Json(left.passed_over)},
                {"age_s", age},
                {"resumable", reason.empty()},
                {"reason", reason.empty() ? Json() : Json(reason)},
                {"made_by", left.owner}};
    if (!left.run.empty()) {
      const Json run = Json::parse(left.run, nullptr, false);
      object["run"] = run.is_discarded() ? Json(left.run) : run;
    }
    std::cout << object.dump(2) << "\n";
    return 0;
  }
  std::cout << fmt::format("{} on storage{}\n", human_bytes(bytes), holder != 0 ? ": " + reason : ", of " + left.owner);
  if (!left.readable) {
    std::cout << (holder != 0 ? "nothing of it is committed yet" : left.state.string() + " " + left.line) << "\n";
    return 0;
  }
  std::cout << fmt::format("state after step {}\n", left.step)
            << fmt::format("generation {}, {} kept; last written {} ago\n", left.generation,
                           left.generations == 1 ? "the only one that is" : "the newest of 2 that are", age_text(age));
  std::cout << may_be_older(left);
  if (holder == 0)
    std::cout << (left.streamed || left.resumable ? who_goes_on(left) : "no run goes on with it: " + reason) << "\n";
  std::cout << export_command(options.storage) << " writes it as a model folder\n";
  return 0;
}

int run_verify(const StoreCommandOptions& options) {
  watch_signals();
  const LeftStore left = free_store_in(options.storage);
  if (!left.readable)
    fail(left.in_part ? io::ErrorKind::usage : io::ErrorKind::corruption, left.state.string(), left.line);
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
  if (model.contents.damaged)
    fail(model.contents.unreadable ? model.contents.unreadable.kind : io::ErrorKind::corruption, left.state.string(),
         fmt::format(
             "generation {}, the state after step {}, is whole, and a run goes on from it; but it may not be the "
             "newest that was committed: {}",
             left.generation, left.step, left.passed_over));
  const double seconds = seconds_since(begun);
  if (options.json)
    std::cout << Json{{"step", left.step}, {"generation", model.store->generation()},
                      {"bytes", bytes},    {"seconds", seconds},
                      {"whole", true},     {"passed_over", left.passed_over.empty() ? Json() : Json(left.passed_over)}}
                     .dump(2)
              << "\n";
  else
    std::cout << fmt::format("whole: the state after step {}, {} verified in {:.1f} s\n", left.step, human_bytes(bytes),
                             seconds)
              << may_be_older(left);
  return 0;
}

}  // namespace tierflow

#include "runtime/program/store_command.h"

#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>

#include "runtime/base/exception.h"
#include "runtime/base/machine.h"
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

std::uint64_t bytes_in(const Folders& storage, const LeftStore& left) {
  std::uint64_t bytes = 0;
  for (const std::filesystem::path& folder : storage) {
    std::error_code ignored;
    const auto size = std::filesystem::file_size(folder / left.state.filename(), ignored);
    if (!ignored) bytes += size;
  }
  return bytes;
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
  const LeftStore left = store_in(options.storage);
  const std::uint64_t bytes = bytes_in(options.storage, left);
  if (options.json) {
    nlohmann::ordered_json object{{"state", left.state.string()},
                                  {"bytes", bytes},
                                  {"readable", left.readable},
                                  {"step", left.step},
                                  {"resumable", left.resumable || left.streamed},
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
            << (left.streamed    ? "the script that made it goes on with it\n"
                : left.resumable ? "the same `tierflow train` command goes on with it\n"
                                 : "no run goes on with it: it was made without --durability\n");
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
  const double seconds = std::chrono::duration<double>(Clock::now() - begun).count();
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

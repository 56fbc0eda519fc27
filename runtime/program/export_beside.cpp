#include "runtime/program/export_beside.h"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "io/thread.h"
#include "runtime/base/exception.h"
#include "runtime/base/seconds.h"
#include "runtime/base/signals.h"

namespace tierflow {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kSlow = 300;  // seconds

io::Error given_up() {
  return {.kind = io::ErrorKind::cancelled, .operation = "export", .detail = "the run ends"};
}

}  // namespace

ExportBeside::~ExportBeside() {
  join();
}

void ExportBeside::join() {
  give_up_ = true;
  if (thread_.joinable()) thread_.join();
  kept_.reset();
}

void ExportBeside::begin(Session& session, Job job) {
  if (busy()) throw std::logic_error("a model is being written already");
  kept_ = session.keep_step();
  if (kept_ == nullptr) return write_at_once(session, std::move(job));
  job_ = std::move(job);
  waited_ = 0;
  look();
}

void ExportBeside::write_at_once(const Session& session, Job job) {
  const auto begun = Clock::now();
  io::Error error;
  try {
    job.write(job.at_once, log_.stoppable_progress());
  } catch (const Exception& failed) {
    if (!session.intact()) throw;
    error = failed.error();
  }
  const double seconds = seconds_since(begun);
  end(std::move(job), error, {.seconds = seconds, .waited = seconds});
}

void ExportBeside::look() {
  if (!busy()) return;
  if (done_) {
    end_beside(error_);
  } else if (thread_.joinable()) {
    if (said_slow_ || seconds_since(begun_) < kSlow) return;
    said_slow_ = true;
    log_.say(
        fmt::format("warning: the model after step {} is being written for {} minutes; until that ends no later "
                    "step is committed",
                    kept_->step(), kSlow / 60));
  } else if (kept_->durable()) {
    start();
  }
}

void ExportBeside::start() {
  give_up_ = waited_for_ = said_slow_ = false;
  written_ = of_ = 0;
  begun_ = Clock::now();
  if (io::Error error = io::start_thread(thread_, "tierflow-export", [this] { run(); })) end_beside(error);
}

// Unless the session waits for the model: then at once.
void ExportBeside::wait_until(Clock::time_point due) const {
  constexpr auto kAtMost = std::chrono::milliseconds(20);
  while (!waited_for_ && Clock::now() < due) {
    if (give_up_) throw Exception(given_up());
    std::this_thread::sleep_for(std::min<Clock::duration>(due - Clock::now(), kAtMost));
  }
}

void ExportBeside::run() {
  error_ = {};
  // When what was moved so far may have been: time in which nothing moved is not caught up with.
  Clock::time_point due = begun_;
  const auto before_move = [&](std::uint64_t bytes) {
    if (give_up_) throw Exception(given_up());
    if (bytes_per_second_ == 0) return;
    const std::chrono::duration<double> takes(static_cast<double>(bytes) / static_cast<double>(bytes_per_second_));
    due = std::max(due, Clock::now()) + std::chrono::duration_cast<Clock::duration>(takes);
    wait_until(due);
  };
  try {
    job_->write([&](const std::filesystem::path& folder,
                    const Progress& progress) { return kept_->export_hf(folder, progress, before_move); },
                [this](const char*, std::uint64_t done, std::uint64_t total) {
                  written_ = done;
                  of_ = total;
                  if (give_up_) throw Exception(given_up());
                });
  } catch (const Exception& failed) {
    error_ = failed.error();
  } catch (const std::exception& failed) {
    error_ = {.kind = io::ErrorKind::internal, .operation = "export", .detail = failed.what()};
  }
  done_ = true;
}

void ExportBeside::finish(Session& session) {
  look();
  if (!busy()) return;
  const auto begun = Clock::now();
  waited_for_ = true;
  if (!thread_.joinable()) {
    const bool now = session.steps() == kept_->step();
    if (now && stop_signal() != 0) return end_beside(given_up());  // the state that is left is that step's
    if (now) {
      kept_.reset();
      return write_at_once(session, *std::exchange(job_, std::nullopt));
    }
    kept_->wait();
    start();
    waited_for_ = true;
  }
  for (bool said = false; thread_.joinable() && !done_;) {
    if (!session.intact()) give_up_ = true;
    if (stop_signal() != 0 && !std::exchange(said, true))
      log_.say(
          fmt::format("the model after step {} is written first; once more ends at once, and the same command "
                      "goes on from that step",
                      kept_->step()));
    log_.progress("writing the model", written_, std::max<std::uint64_t>(of_, 1));
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  if (!busy()) return;  // its thread could not be started
  waited_ += seconds_since(begun);
  end_beside(error_);
}

// What was done or could not be, of the job at hand.
void ExportBeside::end_beside(const io::Error& why) {
  const io::Error error = why;
  const bool ran = thread_.joinable();
  const Took took{.seconds = ran ? seconds_since(begun_) : 0, .waited = waited_, .beside = ran};
  join();
  done_ = false;
  end(*std::exchange(job_, std::nullopt), error, took);
}

void ExportBeside::end(Job job, const io::Error& error, const Took& took) {
  job.write = {};  // the folder of a model that is not there goes before anybody hears of it
  job.ended(error, took);
}

}  // namespace tierflow

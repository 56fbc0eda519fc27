#include "runtime/program/export_beside.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "runtime/base/exception.h"
#include "runtime/base/signals.h"

namespace tierflow {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begun) {
  return std::chrono::duration<double>(Clock::now() - begun).count();
}

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
  job_ = std::move(job);
  kept_ = session.keep_step();
  if (kept_ == nullptr) write_at_once(session);
}

void ExportBeside::write_at_once(const Session& session) {
  const auto begun = Clock::now();
  io::Error error;
  try {
    job_->write(job_->at_once, log_.stoppable_progress());
  } catch (const Exception& failed) {
    if (!session.intact()) throw;
    error = failed.error();
  }
  end(error, seconds_since(begun), false);
}

void ExportBeside::look() {
  if (!busy()) return;
  if (done_) {
    thread_.join();
    end(error_, seconds_, true);
  } else if (!thread_.joinable() && kept_->durable()) {
    start();
  }
}

void ExportBeside::start() {
  give_up_ = false;
  written_ = of_ = 0;
  thread_ = std::thread([this] {
    const auto begun = Clock::now();
    error_ = {};
    try {
      job_->write([this](const std::filesystem::path& folder,
                         const Progress& progress) { return kept_->export_hf(folder, progress); },
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
    seconds_ = seconds_since(begun);
    done_ = true;
  });
}

void ExportBeside::finish(Session& session) {
  if (!busy()) return;
  if (!thread_.joinable() && session.intact() && stop_signal() == 0) {
    if (session.steps() == kept_->step()) {
      kept_.reset();
      return write_at_once(session);
    }
    kept_->wait();
    start();
  }
  while (thread_.joinable() && !done_) {
    if (stop_signal() != 0 || !session.intact()) give_up_ = true;
    log_.progress("writing the model", written_, std::max<std::uint64_t>(of_, 1));
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  const bool ran = thread_.joinable();
  join();
  end(ran ? error_ : given_up(), seconds_, true);
}

void ExportBeside::end(const io::Error& error, double seconds, bool beside) {
  kept_.reset();
  done_ = false;
  const Job job = *std::exchange(job_, std::nullopt);
  job.ended(error, seconds, beside);
}

}  // namespace tierflow

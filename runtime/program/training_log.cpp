#include "runtime/program/training_log.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <iostream>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "runtime/base/exception.h"
#include "runtime/base/machine.h"
#include "runtime/base/seconds.h"
#include "runtime/base/signals.h"
#include "runtime/base/terminal.h"

namespace tierflow {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::json;

[[noreturn]] void fail_to_open(const std::filesystem::path& path, int error_number) {
  throw Exception(io::Error{.kind = io::ErrorKind::environment,
                            .operation = "open",
                            .path = path.string(),
                            .error_number = error_number,
                            .detail = "--log-json must name a file that can be written"});
}

// As TRL names them.
void add_rewards(json& line, const PairTotals& pairs, const std::string& before) {
  line[before + "rewards/chosen"] = pairs.share(pairs.reward_chosen);
  line[before + "rewards/rejected"] = pairs.share(pairs.reward_rejected);
  line[before + "rewards/accuracies"] = pairs.accuracy();
  line[before + "rewards/margins"] = pairs.margin();
}

std::string rewards_text(const PairTotals& pairs) {
  return fmt::format(" | {:.0f}% right, margin {:.3f}", 100 * pairs.accuracy(), pairs.margin());
}

}  // namespace

std::string loss_text(double loss) {
  return std::isfinite(loss) ? fmt::format("{:.4f}", loss) : "not finite";
}

std::string norm_text(double norm) {
  return std::isfinite(norm) ? fmt::format("{:.3g}", norm) : "not finite";
}

bool as_predicted(const StepResult& result) {
  return result.clipping == Clipping::none || result.clipping == Clipping::staged;
}

TrainingLog::TrainingLog(const std::filesystem::path& log_json, bool json_on_stdout)
    : path_(log_json), json_on_stdout_(json_on_stdout), terminal_(::isatty(STDERR_FILENO) == 1) {
  if (path_.empty()) return;
  const auto folder = path_.has_parent_path() ? path_.parent_path() : std::filesystem::path(".");
  std::error_code ignored;
  const bool there = std::filesystem::exists(path_, ignored);
  if (::access(there ? path_.c_str() : folder.c_str(), W_OK) != 0) fail_to_open(path_, errno);
  if (std::filesystem::is_directory(path_, ignored)) fail_to_open(path_, EISDIR);
}

TrainingLog::~TrainingLog() {
  if (live_shown_) show("\n");
}

void TrainingLog::begin() {
  if (path_.empty()) return;
  keep_earlier_log();
  errno = 0;
  file_.open(path_, std::ios::app);
  if (!file_) fail_to_open(path_, errno);
  begun_ = true;
  write(std::exchange(waiting_, {}));
}

// The name is linked before it is taken away, so that no file that came to lie under the new name is replaced.
void TrainingLog::keep_earlier_log() {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path_, error) || std::filesystem::is_empty(path_, error)) return;
  for (int number = 1;; ++number) {
    const std::string kept = path_.string() + '.' + std::to_string(number);
    std::filesystem::create_hard_link(path_, kept, error);
    if (error == std::errc::file_exists) continue;
    if (error) return;  // no links on this file system: the new lines follow the earlier ones
    std::filesystem::remove(path_, error);
    return say("the log of an earlier run is kept as " + kept);
  }
}

// What cannot be written costs itself, not the run: the next line is tried anew.
void TrainingLog::show(const std::string& text) {
  std::cerr << text << std::flush;
  if (!std::cerr) std::cerr.clear();
}

void TrainingLog::say(const std::string& line) {
  if (live_shown_ && terminal_) show("\r\033[K");
  live_shown_ = false;
  if (!terminal_) return show(line + '\n');
  const std::size_t columns = columns_of(STDERR_FILENO);
  std::string text;
  for (std::size_t at = 0; at <= line.size();) {
    const std::size_t end = std::min(line.find('\n', at), line.size());
    text += wrapped(std::string_view(line).substr(at, end - at), columns) + '\n';
    at = end + 1;
  }
  show(text);
}

// On a terminal the line replaces the one before, and is cut where a second one would begin; elsewhere one every ten
// seconds is kept.
void TrainingLog::live(std::string line, bool last) {
  if (!terminal_ && !last && live_shown_ && seconds_since(last_live_) < 10) return;
  last_live_ = Clock::now();
  if (terminal_) line.resize(std::min(line.size(), columns_of(STDERR_FILENO) - 1));
  show((terminal_ ? "\r\033[K" : "") + line + (terminal_ && !last ? "" : "\n"));
  live_shown_ = !(terminal_ && last);
}

void TrainingLog::progress(const char* phase, std::uint64_t done, std::uint64_t total) {
  if (phase_ != phase) {
    phase_ = phase;
    phase_started_ = last_live_ = Clock::now();
    live_shown_ = false;
  }
  if (seconds_since(phase_started_) < 2) return;
  if (done < total && seconds_since(last_live_) < 0.5) return;
  live(fmt::format("{}: {:.0f}%", phase, total == 0 ? 100.0 : 100.0 * done / total), done == total);
}

Progress TrainingLog::stoppable_progress() {
  return [this](const char* phase, std::uint64_t done, std::uint64_t total) {
    throw_if_stopped();
    progress(phase, done, total);
  };
}

void TrainingLog::watch(std::unique_ptr<GpuMonitor> gpu) {
  gpu_ = std::move(gpu);
  if (gpu_ != nullptr) energy_ = gpu_->sample().energy;
}

// Energy is that of the whole card, evaluation between steps apart.
json TrainingLog::gpu_since_last_step(std::int64_t tokens) {
  const GpuSample sample = gpu_->sample();
  json gpu = json::object();
  if (sample.utilisation) gpu["utilisation"] = *sample.utilisation;
  if (sample.power) gpu["power_w"] = *sample.power;
  if (sample.energy && energy_) {
    gpu["energy_j"] = *sample.energy - *energy_;
    gpu["energy_per_token_j"] = (*sample.energy - *energy_) / static_cast<double>(std::max<std::int64_t>(1, tokens));
  }
  energy_ = sample.energy;
  return gpu;
}

void TrainingLog::step(const StepResult& result, std::int64_t of_steps, double lr, const Session& session) {
  const auto now = session.lanes();
  json lanes;
  double busiest = -1;
  const char* limit = "compute";
  for (int i = 0; i < swap::kLanes; ++i) {
    const char* name = swap::lane_name(static_cast<swap::Lane>(i));
    const double busy = now[i].busy_seconds - lanes_[i].busy_seconds;
    lanes[name] = {{"bytes", now[i].bytes - lanes_[i].bytes}, {"busy_s", busy}};
    if (busy > busiest) {
      busiest = busy;
      limit = name;
    }
  }
  const auto disk_write = static_cast<std::size_t>(swap::Lane::disk_write);
  const double terabytes = 1e-12 * static_cast<double>(now[disk_write].bytes - lanes_[disk_write].bytes);
  terabytes_ += terabytes;
  ++steps_;
  lanes_ = now;
  tokens_ += static_cast<double>(result.tokens);
  training_seconds_ += result.seconds;
  if (as_predicted(result)) step_seconds_.push_back(static_cast<float>(result.seconds));
  speculative_ += result.clipping == Clipping::speculative ? 1 : 0;
  undone_ += result.clipping == Clipping::undone ? 1 : 0;
  const double rate = result.tokens / result.seconds;
  const MemoryUse memory = session.memory();
  json line{{"step", result.step},
            {"loss", result.loss},
            {"grad_norm", result.grad_norm},
            {"lr", lr},
            {"tokens", result.tokens},
            {"tokens_per_s", rate},
            {"step_s", result.seconds},
            {"skipped", result.skipped},
            {"clipping", clipping_name(result.clipping)},
            {"computed_again", result.computed_again},
            {"allocator_retries", result.allocator_retries},
            {"tb_written", terabytes},
            {"lanes", lanes},
            {"limit", limit},
            {"attention", session.attention()},
            {"device_memory_peak", memory.device_peak},
            {"host_memory", memory.host_used}};
  if (gpu_ != nullptr) line["gpu"] = gpu_since_last_step(result.tokens);
  if (!result.experts_touched.empty()) {
    line["experts_touched"] = result.experts_touched;
    line["gradient_bytes_left_out"] = result.gradient_bytes_left_out;
  }
  left_out_ += static_cast<double>(result.gradient_bytes_left_out);
  const bool balances = std::isfinite(result.aux_loss);
  if (balances) line["aux_loss"] = result.aux_loss;
  for (const std::int64_t touched : result.experts_touched) {
    const double share = static_cast<double>(touched) / static_cast<double>(result.experts);
    touched_ += share;
    fewest_touched_ = std::fmin(fewest_touched_, share);
    ++layers_touched_;
  }
  if (result.embedding_bytes_of_all != 0)
    line["embedding"] = {{"rows", result.embedding_rows},
                         {"bytes", result.embedding_bytes},
                         {"bytes_of_all", result.embedding_bytes_of_all}};
  embedding_.rows += static_cast<double>(result.embedding_rows);
  embedding_.bytes += static_cast<double>(result.embedding_bytes);
  embedding_.bytes_of_all += static_cast<double>(result.embedding_bytes_of_all);
  if (result.pairs) add_rewards(line, *result.pairs, "");
  const bool distills = session.options().loss.distills();
  if (distills) line.update({{"ce_loss", result.ce_loss}, {"kd_loss", result.kd_loss}});
  object(line);
  const double left =
      (of_steps - result.step) * training_seconds_ / static_cast<double>(steps_);  // those of this process
  live(fmt::format(
           "step {}/{} |{} loss {}{} | norm {} | lr {:.2e} | {:.0f} tok/s | attention {} | limit {} {:.0f}% | device "
           "{}/{} host {}/{} | {} left",
           result.step, of_steps, result.skipped ? " SKIPPED: not finite |" : "", loss_text(result.loss),
           (result.pairs ? rewards_text(*result.pairs)
            : distills   ? fmt::format(" (ce {}, kd {})", loss_text(result.ce_loss), loss_text(result.kd_loss))
                         : "") +
               (balances ? fmt::format(" (aux {})", loss_text(result.aux_loss)) : ""),
           norm_text(result.grad_norm), lr, rate, session.attention(), limit, 100 * busiest / result.seconds,
           human_bytes(memory.device_peak), human_bytes(memory.device_budget), human_bytes(memory.host_used),
           human_bytes(memory.host_budget),
           left >= 3600 ? fmt::format("{:.1f} h", left / 3600)
           : left >= 60 ? fmt::format("{:.0f} min", left / 60)
                        : fmt::format("{:.0f} s", left)),
       result.skipped || result.step == of_steps);
}

double TrainingLog::typical_step_seconds() const {
  std::vector<float> seconds(step_seconds_.begin() + (step_seconds_.size() > 1 ? 1 : 0), step_seconds_.end());
  if (seconds.empty()) return 0;
  const auto middle = seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 2);
  std::nth_element(seconds.begin(), middle, seconds.end());
  return *middle;
}

std::string TrainingLog::limiting_lane(const Session& session) const {
  const auto lanes = session.lanes();
  int most = static_cast<int>(swap::Lane::compute);
  for (int i = 0; i < swap::kLanes; ++i)
    if (lanes[i].busy_seconds > lanes[most].busy_seconds) most = i;
  return swap::lane_name(static_cast<swap::Lane>(most));
}

void TrainingLog::no_step_moved_that(const Session& session) {
  const auto now = session.lanes();
  // But for what was written: updates that the steps had deferred.
  constexpr auto kWrites = static_cast<std::size_t>(swap::Lane::disk_write);
  terabytes_ += static_cast<double>(now[kWrites].bytes - lanes_[kWrites].bytes) / 1e12;
  lanes_ = now;
  if (gpu_ != nullptr) energy_ = gpu_->sample().energy;
}

void TrainingLog::evaluation(std::int64_t step, const PairTotals& found, const Session& session) {
  no_step_moved_that(session);
  json line{{"step", step}, {"held_out_loss", found.mean_loss()}, {"held_out_pairs", found.pairs}};
  add_rewards(line, found, "held_out_");
  object(line);
  say(fmt::format("step {}: held-out loss {}, {:.1f}% of {} pairs right, margin {:.3f}", step,
                  loss_text(found.mean_loss()), 100 * found.accuracy(), found.pairs, found.margin()));
}

void TrainingLog::evaluation(std::int64_t step, const Evaluation& found, const Session& session) {
  no_step_moved_that(session);
  object({{"step", step},
          {"held_out_loss", found.loss},
          {"held_out_perplexity", std::exp(found.loss)},
          {"held_out_accuracy", found.accuracy},
          {"held_out_tokens", found.tokens}});
  say(fmt::format("step {}: held-out loss {}, {:.1f}% of {} tokens right", step, loss_text(found.loss),
                  100 * found.accuracy, found.tokens));
}

void TrainingLog::object(const json& object) {
  const std::string line = object.dump(-1, ' ', false, json::error_handler_t::replace) + '\n';
  if (json_on_stdout_ && !stdout_failed_) {
    std::cout << line << std::flush;
    if (!std::cout) {
      stdout_failed_ = true;
      std::cout.clear();
      say("warning: standard output cannot be written any more; the command goes on without it");
    }
  }
  if (path_.empty() || file_failed_) return;
  if (begun_)
    write(line);
  else
    waiting_ += line;
}

void TrainingLog::write(const std::string& lines) {
  file_ << lines << std::flush;
  if (file_) return;
  file_failed_ = true;
  say("warning: " + path_.string() + " cannot be written any more; the command goes on without it");
}

}  // namespace tierflow

// What a model's stages take, on the model itself or on a narrower one.
#include <torch/cuda.h>
#include <torch/types.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <set>

#include "runtime/base/load_meter.h"
#include "runtime/base/machine.h"
#include "runtime/device/device_memory.h"
#include "runtime/models/products.h"
#include "runtime/planning/repeat.h"
#include "runtime/session/layers.h"
#include "runtime/session/profiler.h"
#include "runtime/session/stage_probe.h"
#include "runtime/spec/stage_class.h"
#include "runtime/state/streamed_state.h"

namespace tierflow {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kNarrowest = 3;       // parts of the width: two narrower models have to remain
constexpr double kRepeats = 4;      // of work that takes long: pages first, then the readings
constexpr double kOverhead = 0.05;  // seconds of a reading that takes none
constexpr double kFillRate = 1e9;   // bytes a second in which weights and gradients are made for a reading
constexpr double kMostSecondsEach = 1.2;
constexpr double kSweepRate = 8e9;  // bytes a second, about
constexpr double kBackward = 3;     // of forwards
constexpr auto kSayEvery = std::chrono::seconds(5);

// What measuring a model's stages takes.
class Estimate {
 public:
  Estimate(const ModelSpec& spec, const SessionOptions& options, double rate, double seconds_each)
      : spec_(spec), options_(options), rate_(rate), each_(seconds_each) {
    const auto model = make_model(spec);
    std::set<std::string> seen;
    for (int stage = 0; stage < static_cast<int>(spec.stages.size()); ++stage) {
      if (!seen.insert(stage_class(spec, stage)).second) continue;
      const bool head = stage + 1 == static_cast<int>(spec.stages.size());
      const int times = model->can_keep(stage) ? 3 : 1;  // computed again, kept, swapped
      readings_ += head ? 1 : 2 * times;
      if (!head) total_ += times * reading(stage, false);
      total_ += times * reading(stage, true);
      computation_ += times * kRepeats * (once(stage, true) + (head ? 0 : once(stage, false)));
    }
  }

  double total() const { return total_; }
  double computation() const { return computation_; }  // of it, where no reading is repeated for its own sake
  int readings() const { return readings_; }
  double reading(int stage, bool backward) const {
    double parameters = 0;
    for (const int unit : spec_.stages[stage].units) parameters += static_cast<double>(spec_.units[unit].parameters());
    const double run = once(stage, backward);
    const double most = StageProbe::kMostRuns * (run + StageProbe::kSweptBytes / kSweepRate);
    return std::max(kRepeats * run, std::min(each_, most)) + kOverhead + (backward ? 6 : 2) * parameters / kFillRate;
  }

 private:
  double once(int stage, bool backward) const {
    const int together = spec_.stages[stage].together ? micro_batches_together(options_) : 1;
    return stage_operations(spec_, stage, together * options_.micro_batch, options_.sequence_length) / rate_ *
           (backward ? kBackward : 1);
  }

  const ModelSpec& spec_;
  const SessionOptions& options_;
  const double rate_, each_;
  double total_ = 0, computation_ = 0;
  int readings_ = 0;
};

// The widest model whose measurement takes no longer than `seconds`, in parts of the width.
int width_within(const ModelSpec& spec, const SessionOptions& options, double rate, double each, double seconds) {
  const int all = width_parts(spec);
  if (all <= kNarrowest || Estimate(spec, options, rate, each).total() <= seconds) return all;
  int parts = all - 1;
  while (parts > kNarrowest && Estimate(narrowed(spec, parts), options, rate, each).total() > seconds)
    parts = std::max(kNarrowest, parts * 7 / 8);
  return parts;
}

// What the largest block takes of a micro-batch's activations and their gradients, about: so many numbers of bf16 for
// each hidden one.
constexpr double kNumbersEach = 40;
constexpr double kLeastSeconds = 1;  // are always there

// The sequences of a micro-batch that are measured: as many as fit half of the memory, and that the narrowest model
// computes within `seconds`.
std::int64_t rows_within(const ModelSpec& spec, const SessionOptions& options, double rate, double seconds,
                         std::uint64_t memory) {
  const ModelSpec narrowest = width_parts(spec) > kNarrowest ? narrowed(spec, kNarrowest) : spec;
  SessionOptions fewer = options;
  const auto too_many = [&] {
    const auto tokens = static_cast<double>(fewer.micro_batch * fewer.sequence_length);
    const double bytes = 2 * kNumbersEach * tokens * static_cast<double>(spec.config.hidden_size);
    return bytes > static_cast<double>(memory) / 2 ||
           Estimate(narrowest, fewer, rate, 0).computation() > std::max(seconds, kLeastSeconds);
  };
  while (fewer.micro_batch > 1 && too_many()) fewer.micro_batch = (fewer.micro_batch + 1) / 2;
  return fewer.micro_batch;
}

std::string whole(double number) {
  return std::to_string(std::llround(number));
}

std::string time_left(double seconds) {
  return seconds >= 90 ? whole(seconds / 60) + " min" : whole(std::max(1.0, seconds)) + " s";
}

// A line every few seconds: how far, and how long still.
class ProgressLines {
 public:
  ProgressLines(const Say& say, const Estimate& estimate) : say_(say), estimate_(estimate) {}

  void done(int stage, bool backward) {
    done_ += estimate_.reading(stage, backward);
    const auto now = Clock::now();
    if (now - said_ < kSayEvery) return;
    said_ = now;
    const double passed = std::chrono::duration<double>(now - started_).count();
    say_("measuring the model's stages: " + whole(100 * std::min(1.0, done_ / estimate_.total())) + "%, about " +
         time_left(std::max(0.0, passed * (estimate_.total() / done_ - 1))) + " left");
  }

 private:
  const Say& say_;
  const Estimate& estimate_;
  const Clock::time_point started_ = Clock::now();
  Clock::time_point said_ = started_;
  double done_ = 0;
};

}  // namespace

double product_rate(const SessionOptions& options) {
  constexpr std::int64_t kWidth = 2048;
  const torch::NoGradGuard no_grad;
  const bool cuda = options.device == "cuda";
  const auto kind = torch::TensorOptions().device(cuda ? torch::kCUDA : torch::kCPU).dtype(torch::kBFloat16);
  const std::int64_t rows = std::clamp<std::int64_t>(options.micro_batch * options.sequence_length, 16, kWidth);
  const torch::Tensor a = torch::ones({rows, kWidth}, kind), b = torch::ones({kWidth, kWidth}, kind);
  const auto product = [&] {
    models::matrix_product(a, b);
    if (cuda) torch::cuda::synchronize();
  };
  product();
  const Reading reading = repeat(
      {.fewest = 3, .most = 1000, .seconds = 0.1}, [] {}, product);
  return 2.0 * static_cast<double>(rows * kWidth * kWidth) / std::max(1e-9, reading.seconds);
}

ModelProfile measure_model(const ModelSpec& spec, const SessionOptions& asked, double seconds, const Say& say) {
  const torch::NoGradGuard no_grad;
  const bool cuda = asked.device == "cuda";
  const torch::Device torch_device = cuda ? torch::kCUDA : torch::kCPU;
  DeviceMemory& memory = cuda ? DeviceMemory::cuda() : DeviceMemory::install();
  DeviceMemory::Share share(memory);
  share.set(DeviceMemory::kNoCap);
  const LoadMeter load;
  const double rate = product_rate(asked);
  const int readings = Estimate(spec, asked, rate, 0).readings();
  const double each = std::min(kMostSecondsEach, seconds / 2 / readings);
  SessionOptions options = asked;
  options.micro_batch = rows_within(spec, asked, rate, seconds, cuda ? swap::cuda_bytes_free(0) : memory_available());
  const int all = width_parts(spec), parts = width_within(spec, options, rate, each, seconds);
  const ModelSpec measured = parts == all ? spec : narrowed(spec, parts);
  const Estimate estimate(measured, options, rate, each);
  std::string line = "measuring the model's stages: about " + time_left(estimate.total());
  if (parts != all)
    line += ", at " + std::to_string(parts) + "/" + std::to_string(all) +
            " of their width: at all of it they would take " + time_left(Estimate(spec, options, rate, each).total());
  if (options.micro_batch != asked.micro_batch)
    line += ", with " + std::to_string(options.micro_batch) + " of the micro-batch's " +
            std::to_string(asked.micro_batch) + " sequences";
  say(line);
  ProgressLines progress(say, estimate);
  const auto device = open_device(options.device);
  const auto probe = [&](const ModelSpec& of, const StageTiming& timing) {
    const std::unique_ptr<LayeredModel> model = make_model(of);
    return StageProbe(*model, memory, torch_device, timing)
        .measure(options.micro_batch, options.sequence_length, /*train=*/true, {}, micro_batches_together(asked));
  };
  ProbedModel probed =
      probe(measured, {.device = device.get(), .seconds_each = each, .done = [&](int stage, bool backward) {
                         progress.done(stage, backward);
                       }});
  if (parts != all) {
    const int half = std::max(2, parts / 2), quarter = std::max(1, parts / 4);
    say("measuring the memory of narrower models");
    const ProbedModel low = probe(narrowed(spec, quarter), {}), middle = probe(narrowed(spec, half), {});
    probed = widened(spec, {{{quarter, low}, {half, middle}, {parts, probed}}}, options.micro_batch,
                     options.sequence_length);
  }
  scale_micro_batch(probed, asked.micro_batch, options.micro_batch);
  ModelProfile profile{.stage_peak = probed.needs.stage_peak,
                       .keeping_peak = probed.needs.keeping_peak,
                       .micro_batch_bytes = probed.needs.micro_batch_bytes,
                       .device_fixed = probed.needs.device_fixed,
                       .held_peak = probed.needs.held_peak,
                       .width = static_cast<double>(parts) / all,
                       .seconds_allowed = seconds,
                       .readings = {.spread = probed.spread, .other_cores = load.other_cores()}};
  for (int stage = 0; stage < static_cast<int>(spec.stages.size()); ++stage)
    profile.stages[stage_class(spec, stage)] = {.carry_bytes = probed.needs.carry_bytes[stage],
                                                .activation_bytes = probed.needs.activation_bytes[stage],
                                                .swapped_bytes = probed.needs.swapped_bytes[stage],
                                                .seconds = probed.seconds[stage]};
  memory.release_kept();
  profile.process_bytes = resident_set() - std::min(resident_set(), cuda ? 0 : memory.stats().held);
  return profile;
}

}  // namespace tierflow

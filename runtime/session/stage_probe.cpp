#include "runtime/session/stage_probe.h"

#include <torch/cuda.h>

#include <algorithm>
#include <chrono>
#include <map>

#include "runtime/base/exception.h"
#include "runtime/device/tensor_slot.h"
#include "runtime/models/dense_weights.h"
#include "runtime/models/upload.h"
#include "runtime/planning/repeat.h"
#include "runtime/spec/stage_class.h"

namespace tierflow {
namespace {

constexpr std::size_t kFewestRuns = 3;

template <class Tensors>
std::uint64_t bytes_of(const Tensors& tensors) {
  std::uint64_t bytes = 0;
  for (const torch::Tensor& tensor : tensors)
    if (tensor.defined()) bytes += tensor.nbytes();
  return bytes;
}

// Small numbers of both signs, no two neighbours alike: as ordinary to the arithmetic as real weights.
void fill(const torch::Tensor& tensor) {
  constexpr std::int64_t kPattern = 8191;
  const torch::Tensor flat = tensor.view(-1);
  const torch::Tensor pattern =
      (torch::arange(kPattern, tensor.options().dtype(torch::kFloat32)).mul_(1.7F).sin_().mul_(0.03F))
          .to(tensor.dtype());
  std::int64_t filled = std::min(kPattern, flat.numel());
  flat.narrow(0, 0, filled).copy_(pattern.narrow(0, 0, filled));
  while (filled < flat.numel()) {  // twice as much each time: few launches on a device
    const std::int64_t count = std::min(filled, flat.numel() - filled);
    flat.narrow(0, filled, count).copy_(flat.narrow(0, 0, count));
    filled += count;
  }
}

Carry filled_like(const Carry& carry) {
  Carry filled;
  for (const torch::Tensor& part : carry) {
    filled.push_back(part.defined() && part.is_floating_point() ? torch::empty(part.sizes(), part.options()) : part);
    if (part.defined() && part.is_floating_point()) fill(filled.back());
  }
  return filled;
}

// What `from` equal micro-batches have as one, for `to` of them.
Carry regrouped(const Carry& carry, int from, int to, const torch::Tensor& ids) {
  if (from == to || carry.empty()) return carry;
  const std::vector<torch::Tensor> ids_of(static_cast<std::size_t>(std::max(from, to)), ids);
  return from == 1 ? joined(std::vector<Carry>(static_cast<std::size_t>(to), carry)) : apart(carry, ids_of).front();
}

std::byte* bytes_in(const torch::Tensor& slot) {
  return static_cast<std::byte*>(slot.data_ptr());
}

}  // namespace

void ask_of_head(Shared& shared, const MicroBatch& batch, const SessionOptions& options) {
  const torch::Device device = shared.ids.device();
  if (batch.teacher_ids.defined()) {
    const auto parts = models::upload({batch.teacher_ids, batch.teacher_log_probabilities}, device);
    shared.teacher = models::SoftTargets(parts[0], parts[1], options.loss.distillation);
  }
  shared.top = options.top;
}

StageProbe::StageProbe(const LayeredModel& model, DeviceMemory& memory, torch::Device torch_device, StageTiming timing)
    : model_(model),
      memory_(memory),
      torch_device_(torch_device),
      timing_(std::move(timing)),
      seconds_on_(timing_.device) {}

// Where times count, in memory of the device and not of torch: its pages are those that a session computes on.
StageProbe::Bound StageProbe::bind(const std::vector<int>& units, bool backward) {
  const ModelSpec& spec = model_.spec();
  const auto weight = torch::TensorOptions().device(torch_device_).dtype(torch::kBFloat16);
  const auto gradient = weight.dtype(torch::kFloat32);
  Bound bound;
  std::uint64_t bytes = 0, at = 0;
  for (int unit : units)
    for (const TensorSpec& tensor : spec.units[unit].tensors)
      bytes += swap::round_up(swap::word_bytes(tensor.words()), swap::kSector) +
               (backward ? swap::round_up(4 * tensor.elements(), swap::kSector) : 0);
  if (seconds_on_ != nullptr) bound.arena = value_or_throw(seconds_on_->allocate(bytes));
  const auto make = [&](const std::vector<std::int64_t>& shape, const torch::TensorOptions& options) {
    if (seconds_on_ == nullptr) return torch::zeros(shape, options);
    const torch::Tensor made = torch::from_blob(bound.arena.data() + at, shape, options);
    at += swap::round_up(made.nbytes(), swap::kSector);
    return made;
  };
  for (int unit : units)
    for (const TensorSpec& tensor : spec.units[unit].tensors) {
      const bool trained = backward && tensor.trainable;
      bound.weights.push_back(
          tensor.format == WeightFormat::bf16
              ? make(tensor.shape, weight)
              : make({static_cast<std::int64_t>(swap::word_bytes(tensor.words()))}, weight.dtype(torch::kUInt8)));
      bound.gradients.push_back(trained ? make(tensor.shape, gradient) : torch::Tensor());
    }
  return bound;
}

torch::Tensor StageProbe::slot_of(std::uint64_t bytes) const {
  return torch::empty({static_cast<std::int64_t>(bytes)},
                      torch::TensorOptions().device(torch_device_).dtype(torch::kUInt8));
}

template <class Work>
double StageProbe::time(Work work) {
  if (!swept_.defined())
    swept_ = torch::zeros({kSweptBytes}, torch::TensorOptions().device(torch_device_).dtype(torch::kUInt8));
  const auto wait = [&] {
    if (torch_device_.is_cuda()) torch::cuda::synchronize();
  };
  const Reading reading = repeat(
      {.fewest = kFewestRuns, .most = kMostRuns, .seconds = timing_.seconds_each},
      [&] {
        swept_.add_(1);
        wait();
      },
      [&] {
        work();
        wait();
      });
  timed_seconds_ += reading.seconds;
  spread_seconds_ += reading.seconds * reading.spread;
  return reading.seconds;
}

// Runs a stage on weights, and gradients where it has some, of its own: raises the peak to what that takes beside them.
// There weights and what is given are zeros or nearly so: all tokens at the same experts, the most that they can take.
// Where time counts they are ordinary numbers: tokens spread over the experts.
template <class Work>
auto StageProbe::run(int stage, bool backward, double& seconds, const Given& given, Work work) {
  if (!warmed_up_) memory_.release_kept();  // blocks of the stage before, which this one may not be able to reuse
  const Bound bound = bind(model_.spec().stages[stage].units, backward);
  const std::uint64_t fixed = memory_.stats().used;
  if (!warmed_up_) memory_.reset_peak();
  const auto compute = [&](const Given& with) {
    return work(models::dense_weights(model_.spec(), stage, bound.weights),
                gradients_on(torch_device_, bound.gradients, {}), with);
  };
  auto out = compute(given);
  if (warmed_up_) return out;
  peaks_[stage] = std::max(peaks_[stage], memory_.stats().peak_used - fixed);
  if (seconds_on_ == nullptr) return out;
  for (const torch::Tensor& weight : bound.weights) fill(weight);
  for (const torch::Tensor& gradient : bound.gradients)
    if (gradient.defined()) gradient.zero_();
  const Given ordinary{.input = filled_like(given.input), .d_out = filled_like(given.d_out)};
  seconds = time([&] { compute(ordinary); });
  timing_.done(stage, backward);
  return out;
}

ProbedModel StageProbe::measure(std::int64_t micro_batch, std::int64_t sequence_length, bool train,
                                const SessionOptions& head, int together) {
  together_ = together;
  ProbedModel result = pass(micro_batch, sequence_length, train, head);
  if (seconds_on_ == nullptr) return result;
  swept_.reset();
  memory_.release_kept();
  memory_.reset_peak();
  const std::uint64_t before = memory_.stats().held;
  warmed_up_ = true;
  pass(micro_batch, sequence_length, train, head);
  warmed_up_ = false;
  result.needs.held_peak = memory_.stats().peak_held - before;
  return result;
}

// With zeros for weights, every token takes each expert that any takes.
Carry StageProbe::forward_in_parts(int stage, const Weights& weights, const Weights& needed, const Carry& input,
                                   const Shared& shared) {
  const ModelSpec& spec = model_.spec();
  const std::uint64_t before = memory_.stats().used;
  const auto parts = model_.begin(stage, weights, input, shared);
  begun_bytes_ = std::max(begun_bytes_, memory_.stats().used - before);
  for (const int position : parts->needed())
    parts->add(position, models::dense_weights(spec.units, {spec.stages[stage].on_demand.front()}, needed));
  return parts->finish();
}

// A stage that keeps its activations, and one that swaps them: what that takes, apart from the peak of those that
// compute them again.
void StageProbe::forward_keeping(int stage, const Given& given, const Shared& shared, ProbedModel& result,
                                 swap::StageSeconds& seconds) {
  ComputeNeeds& needs = result.needs;
  const std::uint64_t peak = std::exchange(peaks_[stage], 0);
  try {
    run(stage, false, seconds.forward_keeping, given, [&](const Weights& weights, const Gradients&, const Given& with) {
      const std::uint64_t before = memory_.stats().used;
      Carry through = with.input;
      const auto kept = model_.forward_keeping(stage, weights, through, shared);
      needs.activation_bytes[stage] = memory_.stats().used - before - bytes_of(through);
      needs.swapped_bytes[stage] = slot_bytes(shapes_in_slot(kept->essentials()));
      return 0;
    });
    result.keeping_peaks[stage] = peaks_[stage];
    needs.keeping_peak = std::max(needs.keeping_peak, peaks_[stage]);
    if (seconds_on_ != nullptr) {
      const torch::Tensor slot = slot_of(needs.swapped_bytes[stage]);
      run(stage, false, seconds.forward_swapping, given,
          [&](const Weights& weights, const Gradients&, const Given& with) {
            Carry through = with.input;
            copy_to_slot(bytes_in(slot), model_.forward_keeping(stage, weights, through, shared)->essentials());
            return 0;
          });
    }
  } catch (const c10::Error& error) {
    if (!is_out_of_memory(error)) throw;
    needs.activation_bytes[stage] = needs.swapped_bytes[stage] = 0;  // does not fit even alone
  }
  peaks_[stage] = peak;
}

// Their backwards, which take their forwards' results: timed with them.
void StageProbe::backward_kept(int stage, const Given& given, const Shared& shared, std::uint64_t swapped,
                               swap::StageSeconds& seconds) {
  const std::uint64_t peak = peaks_[stage];
  const torch::Tensor slot = slot_of(swapped);
  double keeping = 0, swapping = 0;
  run(stage, true, keeping, given, [&](const Weights& weights, const Gradients& gradients, const Given& with) {
    Carry through = with.input;
    auto kept = model_.forward_keeping(stage, weights, through, shared);
    return model_.backward_kept(stage, weights, gradients, with.input, shared, with.d_out, std::move(kept));
  });
  run(stage, true, swapping, given, [&](const Weights& weights, const Gradients& gradients, const Given& with) {
    Carry through = with.input;
    const auto shapes =
        copy_to_slot(bytes_in(slot), model_.forward_keeping(stage, weights, through, shared)->essentials());
    auto kept =
        model_.restore(stage, weights, with.input, shared, tensors_in_slot(bytes_in(slot), shapes, torch_device_));
    return model_.backward_kept(stage, weights, gradients, with.input, shared, with.d_out, std::move(kept));
  });
  seconds.backward_kept = std::max(0.0, keeping - seconds.forward_keeping);
  seconds.backward_swapped = std::max(0.0, swapping - seconds.forward_swapping);
  peaks_[stage] = peak;
}

// Every class of stages forward, and backward.
ProbedModel StageProbe::pass(std::int64_t micro_batch, std::int64_t sequence_length, bool train,
                             const SessionOptions& head) {
  const torch::NoGradGuard no_grad;
  const ModelSpec& spec = model_.spec();
  const int last = static_cast<int>(spec.stages.size()) - 1;
  const auto taken = [&](int stage) { return spec.stages[stage].together ? together_ : 1; };  // micro-batches
  // Ids spread over the vocabulary as a text's are; where only memory counts, any will do.
  const auto options = torch::TensorOptions().device(torch_device_).dtype(torch::kInt64);
  const std::int64_t vocabulary = seconds_on_ == nullptr ? 1 : std::max<std::int64_t>(1, spec.config.vocab_size);
  const auto ids = torch::arange(micro_batch * sequence_length, options)
                       .mul_(7919)
                       .remainder_(vocabulary)
                       .view({micro_batch, sequence_length});
  MicroBatch batch{.ids = ids, .labels = ids};
  if (train && head.loss.distills()) {
    const std::int64_t top = head.loss.distillation.top;
    batch.teacher_ids = torch::arange(top, options.dtype(torch::kInt32)).expand({micro_batch, sequence_length, top});
    batch.teacher_log_probabilities = torch::zeros(batch.teacher_ids.sizes(), options.dtype(torch::kFloat16));
  }
  Shared shared = model_.share(batch, torch_device_);
  ask_of_head(shared, batch, head);
  ProbedModel result;
  result.seconds.resize(seconds_on_ == nullptr ? 0 : last + 1);
  result.needs.activation_bytes.assign(last + 1, 0);
  result.needs.swapped_bytes.assign(last + 1, 0);
  swap::StageSeconds unused;
  const auto seconds_of = [&](int stage) -> swap::StageSeconds& {
    return seconds_on_ == nullptr ? unused : result.seconds[stage];
  };
  result.keeping_peaks.assign(last + 1, 0);
  peaks_.assign(last + 1, 0);
  std::uint64_t carry_bytes = 0;
  std::vector<std::string> kinds;
  std::vector<Carry> inputs(1);
  struct Seen {
    Carry out;
    int stage = 0;
  };
  std::map<std::string, Seen> seen;
  for (int stage = 0; stage <= last; ++stage) {
    if (stage > 0) inputs[stage] = regrouped(inputs[stage], taken(stage - 1), taken(stage), ids);
    kinds.push_back(stage_class(spec, stage));
    for (const torch::Tensor& part : inputs[stage]) {
      kinds[stage] += " <";
      for (const std::int64_t size : part.sizes()) kinds[stage].append(" ").append(std::to_string(size));
    }
    result.needs.carry_bytes.push_back(
        slot_bytes(shapes_in_slot(taken_by_backward(spec.stages[stage], inputs[stage]))));
    carry_bytes = std::max(carry_bytes, bytes_of(inputs[stage]) / taken(stage));
    if (stage == last) break;
    if (const auto found = seen.find(kinds[stage]); found != seen.end()) {
      seconds_of(stage) = seconds_of(found->second.stage);
      result.needs.activation_bytes[stage] = result.needs.activation_bytes[found->second.stage];
      result.needs.swapped_bytes[stage] = result.needs.swapped_bytes[found->second.stage];
    } else {
      double& forward = seconds_of(stage).forward;
      const Given given{.input = inputs[stage]};
      const std::vector<int>& on_demand = spec.stages[stage].on_demand;
      const Bound needed = on_demand.empty() ? Bound{} : bind({on_demand.front()}, false);
      Carry out = run(stage, false, forward, given, [&](const Weights& weights, const Gradients&, const Given& with) {
        return on_demand.empty() ? model_.forward(stage, weights, with.input, shared, train)
                                 : forward_in_parts(stage, weights, needed.weights, with.input, shared);
      });
      seconds_of(stage).evaluate = forward / taken(stage);
      if (train && !warmed_up_ && model_.can_keep(stage))
        forward_keeping(stage, given, shared, result, seconds_of(stage));
      seen[kinds[stage]] = {std::move(out), stage};
    }
    inputs.push_back(seen[kinds[stage]].out);
  }
  seen.clear();
  Carry d_carry = run(last, train, seconds_of(last).head, {.input = inputs[last]},
                      [&](const Weights& weights, const Gradients& gradients, const Given& with) {
                        if (train)
                          return model_.head_loss_and_backward(weights, gradients, with.input, shared, 1.0).d_carry;
                        model_.head_scores(weights, with.input, shared);
                        return Carry();
                      });
  for (int stage = last - 1; stage >= 0 && train; --stage) {
    d_carry = regrouped(d_carry, taken(stage + 1), taken(stage), ids);
    carry_bytes = std::max(carry_bytes, bytes_of(d_carry) / taken(stage));
    if (const auto found = seen.find(kinds[stage]); found != seen.end()) {
      const swap::StageSeconds& of = seconds_of(found->second.stage);
      seconds_of(stage).backward = of.backward;
      seconds_of(stage).backward_kept = of.backward_kept;
      seconds_of(stage).backward_swapped = of.backward_swapped;
    } else {
      const Given given{.input = taken_by_backward(spec.stages[stage], inputs[stage]), .d_out = d_carry};
      Carry out = run(stage, true, seconds_of(stage).backward, given,
                      [&](const Weights& weights, const Gradients& gradients, const Given& with) {
                        return model_.backward(stage, weights, gradients, with.input, shared, with.d_out);
                      });
      if (seconds_on_ != nullptr && !warmed_up_ && result.needs.activation_bytes[stage] != 0)
        backward_kept(stage, given, shared, result.needs.swapped_bytes[stage], seconds_of(stage));
      seen[kinds[stage]] = {std::move(out), stage};
    }
    d_carry = seen[kinds[stage]].out;
  }
  result.needs.device_fixed = memory_.fixed() + model_.constant_bytes();
  result.stage_peaks = peaks_;
  result.needs.stage_peak = *std::max_element(peaks_.begin(), peaks_.end());
  result.spread = timed_seconds_ > 0 ? spread_seconds_ / timed_seconds_ : 0;
  result.needs.micro_batch_bytes = std::max(2 * carry_bytes, carry_bytes + begun_bytes_) + bytes_of(shared.tables) +
                                   2 * ids.nbytes() + shared.teacher.bytes();
  return result;
}

}  // namespace tierflow

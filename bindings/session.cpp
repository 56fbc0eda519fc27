// The runtime's Session as Python sees it: a model of its own families, its steps and its results.
#include "runtime/session/session.h"

#include <torch/csrc/utils/pybind.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/convert.h"
#include "bindings/named.h"
#include "runtime/base/exception.h"
#include "runtime/device/device_memory.h"
#include "runtime/models/layered_model.h"
#include "runtime/models/pair_batch.h"
#include "runtime/planning/left_store.h"
#include "runtime/session/adapter_factors.h"
#include "runtime/session/schedule.h"
#include "runtime/spec/base_reference.h"

namespace py = pybind11;

namespace tierflow::bindings {
namespace {

using Released = py::call_guard<py::gil_scoped_release>;

AdapterConfig adapter_of(const py::dict& options, bool galore) {
  AdapterConfig config;
  if (galore) config = {.rank = 128, .alpha = 1, .init = AdapterInit::galore, .windows = {.scale = 2}};
  Named named(options);
  std::string init;
  named.take("rank", config.rank);
  if (galore) {
    named.take("update_gap", config.windows.steps);
    named.take("scale", config.windows.scale);
  } else {
    named.take("alpha", config.alpha);
    named.take("dropout", config.dropout);
    named.take("rank_stabilised", config.rank_stabilised);
    named.take("dora", config.dora);
    named.take("parameters", config.parameters);
    named.take("parameters_alone", config.parameters_alone);
    named.take("saved", config.saved);
    named.take("init", init);
    if (!init.empty()) set_adapter_init(config, init);
  }
  named.take("targets", config.targets);
  named.take("exclude", config.exclude);
  named.take("layers", config.layers);
  named.expect_no_more();
  if (config.targets == std::vector<std::string>{"all-linear"}) config.targets.clear();
  return config;
}

LossRule loss_of(const py::dict& options) {
  LossRule rule;
  Named named(options);
  std::string kind = "cross-entropy";
  named.take("kind", kind);
  rule.kind = parse_loss(kind);
  named.take("beta", rule.beta);
  named.take("gamma", rule.simpo_gamma);
  named.take("top", rule.distillation.top);
  named.take("alpha", rule.distillation.alpha);
  named.take("ce_alpha", rule.distillation.ce_alpha);
  named.take("temperature", rule.distillation.temperature);
  named.expect_no_more();
  return rule;
}

struct Wanted {
  Schedule schedule;
  std::string model, method = "full", base_precision = "bf16", adapter;
  AdapterConfig adapters;
  SessionOptions session;
  AdamW adamw;
};

Wanted wanted_of(const std::string& model, const py::dict& options) {
  Wanted wanted{.model = model};
  SessionOptions& session = wanted.session;
  Named named(options);
  std::vector<std::string> storage;
  std::string precision;
  bool any_filesystem = false;
  py::dict loss, adapters;
  named.take("method", wanted.method);
  named.take("base_precision", wanted.base_precision);
  named.take("adapter", wanted.adapter);
  named.take("adapters", adapters);
  named.take("loss", loss);
  named.take("device", session.device);
  named.take("device_memory", session.device_memory);
  named.take("host_memory", session.host_memory);
  named.take("storage", storage);
  named.take("allow_any_filesystem", any_filesystem);
  named.take("precision", precision);
  named.take("clip", session.clip);
  named.take("micro_batch", session.micro_batch);
  named.take("micro_batches", session.micro_batches);
  named.take("sequence_length", session.sequence_length);
  named.take("seed", session.seed);
  named.take("train", session.train);
  named.take("top", session.top);
  named.take("lr", wanted.schedule.lr);
  named.take("lr_schedule", wanted.schedule.kind);
  named.take("warmup", wanted.schedule.warmup);
  named.take("steps", wanted.schedule.steps);
  named.take("commit_every", session.commit_every);
  named.take("go_back", session.go_back);
  named.take("run", session.run);
  std::pair<double, double> betas{wanted.adamw.beta1, wanted.adamw.beta2};
  named.take("betas", betas);
  std::tie(wanted.adamw.beta1, wanted.adamw.beta2) = betas;
  named.take("eps", wanted.adamw.eps);
  named.take("weight_decay", wanted.adamw.weight_decay);
  named.expect_no_more();
  check_schedule(wanted.schedule);
  wanted.adamw.lr = wanted.schedule.lr;
  for (const std::string& folder : storage) session.storage.emplace_back(folder);
  session.allow_any_filesystem = session.allow_buffered = any_filesystem;
  if (!precision.empty()) session.precision = parse_precision(precision);
  session.loss = loss_of(loss);
  if (wanted.method != "full" && wanted.method != "lora" && wanted.method != "galore")
    fail_usage("the method \"" + wanted.method + "\" is none of full, lora, galore");
  if (wanted.method == "full" && !adapters.empty())
    fail_usage("adapters= is for method=\"lora\" or \"galore\"; without method= every weight is trained");
  if (wanted.method != "lora" && (!wanted.adapter.empty() || wanted.base_precision != "bf16"))
    fail_usage(std::string(wanted.adapter.empty() ? "base_precision=" : "adapter=") +
               " is for method=\"lora\", whose base is not trained");
  if (!wanted.adapter.empty() && !adapters.empty())
    fail_usage("adapter= names a folder that has its own settings: leave out adapters=");
  wanted.adapters = adapter_of(adapters, wanted.method == "galore");
  return wanted;
}

Model model_of(const Wanted& wanted) {
  Model model = load(wanted.model);
  if (wanted.method == "lora") {
    model = with_base_format(model, parse_weight_format(wanted.base_precision));
    model = wanted.adapter.empty() ? with_adapters(model, wanted.adapters, wanted.session.seed)
                                   : with_adapters(model, wanted.adapter);
  } else if (wanted.method == "galore") {
    model = with_adapters(model, wanted.adapters, wanted.session.seed);
  }
  return wanted.session.loss.pairs() ? without_dropout(model) : model;
}

// Throws Exception (kind usage), naming what differs, where the state is of a run that was asked for something else.
void expect_same_run(const std::string& then, const SessionOptions& now) {
  const auto before = nlohmann::json::parse(then, nullptr, false), wanted = nlohmann::json::parse(now.run);
  std::string what;
  for (const auto& [name, value] : wanted.items())
    if (const auto had = before.is_object() ? before.value(name, nlohmann::json()) : nlohmann::json(); had != value)
      what += (what.empty() ? "" : ", ") + name + " " + had.dump() + ", not " + value.dump();
  if (what.empty()) return;
  throw Exception(io::Error{.kind = io::ErrorKind::usage,
                            .path = now.storage.front().string(),
                            .detail = "the run whose state is here had " + what +
                                      ": make the session as then, or remove state.tfv* there to begin anew"});
}

// Has the session resume from the state in its folders, if there is one.
void resume_if_left(SessionOptions& session) {
  if (session.commit_every == 0) return;
  const LeftStore left = find_left_store(session.storage);
  if (left.empty) return discard_store(session.storage);  // of a run that ended before its first commit
  if (!left.there) return;
  if (!left.resumable) refuse_left_store(session.storage);
  expect_same_run(left.run, session);
  session.resume = true;
  session.chunk_elements = left.chunk_elements;
}

// A tensor that a micro-batch names, as the runtime takes it, or an undefined one.
torch::Tensor tensor_of(const py::dict& batch, const char* name, torch::ScalarType type) {
  if (!batch.contains(name) || batch[name].is_none()) return {};
  return batch[name].cast<torch::Tensor>().detach().to(torch::kCPU).to(type).contiguous();
}

MicroBatch micro_batch_of(const py::dict& given) {
  MicroBatch batch{.ids = tensor_of(given, "input_ids", torch::kLong),
                   .labels = tensor_of(given, "targets", torch::kLong),
                   .positions = tensor_of(given, "position_ids", torch::kLong),
                   .teacher_ids = tensor_of(given, "teacher_ids", torch::kInt),
                   .teacher_log_probabilities = tensor_of(given, "teacher_log_probabilities", torch::kHalf)};
  if (!batch.ids.defined() || !batch.labels.defined()) fail_usage("a micro-batch has input_ids and labels");
  // Of each row the tokens up to the last one that the mask counts.
  if (const torch::Tensor mask = tensor_of(given, "attention_mask", torch::kLong); mask.defined()) {
    if (mask.sizes() != batch.ids.sizes()) fail_usage("a micro-batch's attention_mask has the shape of its input_ids");
    const torch::Tensor places = torch::arange(1, mask.size(1) + 1, torch::kLong);
    const torch::Tensor lengths = (mask.ne(0) * places).amax(1).contiguous();
    batch.lengths.assign(lengths.const_data_ptr<std::int64_t>(),
                         lengths.const_data_ptr<std::int64_t>() + lengths.numel());
  }
  if (given.contains("reference")) {
    const torch::Tensor reference = tensor_of(given, "reference", torch::kDouble).view({-1});
    batch.reference.assign(reference.const_data_ptr<double>(), reference.const_data_ptr<double>() + reference.numel());
  }
  return batch;
}

std::vector<MicroBatch> micro_batches_of(const std::vector<py::dict>& given) {
  std::vector<MicroBatch> batches;
  for (const py::dict& batch : given) batches.push_back(micro_batch_of(batch));
  return batches;
}

void add_rewards(py::dict& result, const PairTotals& pairs) {
  result["pairs"] = pairs.pairs;
  result["rewards/chosen"] = pairs.share(pairs.reward_chosen);
  result["rewards/rejected"] = pairs.share(pairs.reward_rejected);
  result["rewards/accuracies"] = pairs.accuracy();
  result["rewards/margins"] = pairs.margin();
}

// Gives torch's memory of the CPU back to the process without a cap when it ends.
class PythonSession {
 public:
  PythonSession(const std::string& folder, const py::dict& options) {
    Wanted wanted = wanted_of(folder, options);
    schedule_ = wanted.schedule;
    const py::gil_scoped_release released;
    resume_if_left(wanted.session);
    const Model model = model_of(wanted);
    LossRule& loss = wanted.session.loss;
    loss.base_is_reference =
        wanted.session.train && base_is_reference(loss, model.spec(), /*goes_on_with_adapter=*/!wanted.adapter.empty());
    session_ = std::make_unique<Session>(model, wanted.session, wanted.adamw);
  }
  ~PythonSession() { drop(); }
  PythonSession(const PythonSession&) = delete;
  PythonSession& operator=(const PythonSession&) = delete;

  Session& session() const {
    if (session_ == nullptr) fail_usage("the session is closed");
    return *session_;
  }
  // Commits what is not committed yet, where steps are; discard: the state goes.
  void close(bool discard) {
    if (session_ == nullptr) return;
    if (discard)
      session_->discard();
    else if (session_->commit_every() != 0 && session_->intact())
      session_->commit();
    drop();
  }
  py::dict step(const std::vector<py::dict>& given, const py::object& lr) {
    const std::vector<MicroBatch> batches = micro_batches_of(given);
    const double rate = value_of<std::optional<double>>("lr", lr).value_or(schedule_.after(session().steps()));
    check_schedule({.lr = rate});
    StepResult step;
    {
      const py::gil_scoped_release released;
      if (session().waits_for_gradient()) session().begin_with_gradient(batches);
      step = session().step(batches, rate);
    }
    py::dict result;
    result["step"] = step.step;
    result["loss"] = step.loss;
    result["lr"] = rate;
    result["grad_norm"] = step.grad_norm;
    result["skipped"] = step.skipped;
    result["tokens"] = step.tokens;
    result["seconds"] = step.seconds;
    if (step.pairs) add_rewards(result, *step.pairs);
    if (session().options().loss.distills()) {
      result["ce_loss"] = step.ce_loss;
      result["kd_loss"] = step.kd_loss;
    }
    if (session().model().spec().config.experts.balance != 0) result["aux_loss"] = step.aux_loss;
    return result;
  }

  // With `top` of the session, also the likeliest tokens of each micro-batch: [(ids, log-probabilities)].
  py::dict evaluate(const std::vector<py::dict>& given) {
    const std::vector<MicroBatch> batches = micro_batches_of(given);
    const LossRule& rule = session().options().loss;
    PairTotals totals;
    std::vector<std::vector<double>> sums;
    std::vector<std::pair<torch::Tensor, torch::Tensor>> tops;
    Evaluation found;
    {
      const py::gil_scoped_release released;
      std::vector<MicroBatch> counted = batches;
      if (rule.pairs())
        for (MicroBatch& batch : counted) batch.labels = head_labels(rule, batch);
      found = session().evaluate(counted, [&](std::int64_t index, const MicroBatch&, const HeadScores& scores) {
        if (scores.top_ids.defined()) tops.emplace_back(scores.top_ids, scores.top_log_probabilities);
        if (!rule.pairs()) return;
        MicroBatch batch = batches[index];
        sums.push_back(row_log_probabilities(batch, scores.losses));
        if (rule.computes_reference()) batch.reference = row_log_probabilities(batch, scores.reference_losses);
        if (!rule.needs_reference() || !batch.reference.empty()) totals.add(pair_totals(rule, batch, scores.losses));
      });
    }
    py::dict result;
    result["loss"] = found.loss;
    result["perplexity"] = std::exp(found.loss);
    result["accuracy"] = found.accuracy;
    result["tokens"] = found.tokens;
    if (!tops.empty()) result["top"] = tops;
    if (!rule.pairs()) return result;
    result["log_probabilities"] = sums;
    if (totals.pairs == 0) return result;
    result["loss"] = totals.mean_loss();
    add_rewards(result, totals);
    return result;
  }

 private:
  void drop() {
    if (std::exchange(session_, nullptr) == nullptr) return;
    DeviceMemory::install().release_kept();
  }

  Schedule schedule_;
  std::unique_ptr<Session> session_;
};

// First values of a layer's adapter from the gradient of its weight (adapter_factors.h): A [rank, in], B [out, rank],
// bf16.
std::pair<torch::Tensor, torch::Tensor> lora_ga_factors(const torch::Tensor& gradient, const std::string& method,
                                                        const FactorsOf& of) {
  AdapterConfig config;
  set_adapter_init(config, method);
  const Factors factors = factors_of_gradient(gradient, config.init, of);
  const auto tensor = [](const std::vector<std::uint16_t>& words, std::int64_t rows) {
    const auto columns = static_cast<std::int64_t>(words.size()) / rows;
    torch::Tensor values = torch::empty({rows, columns}, torch::kBFloat16);
    std::memcpy(values.data_ptr(), words.data(), 2 * words.size());
    return values;
  };
  return {tensor(factors.a, of.rank), tensor(factors.b, gradient.size(0))};
}

}  // namespace

void register_session(py::module_& module) {
  module.def(
      "lora_ga_factors",
      [](const torch::Tensor& gradient, const std::string& method, const std::string& name, std::int64_t rank,
         double scale, bool transposed, std::uint64_t seed) {
        return lora_ga_factors(gradient, method,
                               {.name = name, .rank = rank, .scale = scale, .transposed = transposed, .seed = seed});
      },
      Released());
  py::class_<PythonSession>(module, "Session")
      .def(py::init<const std::string&, const py::dict&>())
      .def("step", &PythonSession::step, py::arg("micro_batches"), py::arg("lr") = py::none())
      .def("evaluate", &PythonSession::evaluate)
      .def("close", &PythonSession::close, py::arg("discard") = false, Released())
      .def(
          "commit", [](const PythonSession& self) { self.session().commit(); }, Released())
      .def_property(
          "notes", [](const PythonSession& self) { return self.session().remembered(); },
          [](const PythonSession& self, const std::string& notes) { self.session().remember(notes); })
      .def("describe", [](const PythonSession& self) { return self.session().describe(); })
      .def_property_readonly("steps", [](const PythonSession& self) { return self.session().steps(); })
      .def_property_readonly(
          "computes_reference",
          [](const PythonSession& self) { return self.session().options().loss.computes_reference(); })
      .def("lanes",
           [](const PythonSession& self) {
             py::dict result;
             const auto counters = self.session().lanes();
             for (std::size_t lane = 0; lane < counters.size(); ++lane)
               result[swap::lane_name(static_cast<swap::Lane>(lane))] = counters[lane].bytes;
             return result;
           })
      .def(
          "export",
          [](const PythonSession& self, const std::string& folder, const std::string& base) {
            return is_written_beside_base(self.session().model().spec()) ? self.session().export_adapter(folder, base)
                                                                         : self.session().export_hf(folder);
          },
          Released());
}

}  // namespace tierflow::bindings

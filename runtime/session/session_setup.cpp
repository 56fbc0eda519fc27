// How a session comes to be: measure what a stage needs, arrange the budgets, make the store, fill it.
#include <algorithm>
#include <cerrno>
#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>

#include "runtime/base/machine.h"
#include "runtime/planning/left_store.h"
#include "runtime/planning/store_cut.h"
#include "runtime/planning/stored_model.h"
#include "runtime/planning/with_room.h"
#include "runtime/session/session_impl.h"
#include "runtime/spec/adapter_config.h"
#include "runtime/spec/experts_on_demand.h"

namespace tierflow {
namespace {

// In 10^12 bytes, rounded up to what an option reads back as no less.
std::string terabytes(std::uint64_t bytes) {
  std::string digits = std::to_string(bytes / 1'000'000 + 1);
  if (digits.size() < 7) digits.insert(0, 7 - digits.size(), '0');
  return digits.insert(digits.size() - 6, ".");
}

// Two texts of one configuration: a later version writes more fields.
bool same_adapter(const nlohmann::json& a, const nlohmann::json& b) {
  if (a == b || !a.is_string() || !b.is_string()) return a == b;
  return parse_adapter_config(a.get<std::string>(), "the state's adapter") ==
         parse_adapter_config(b.get<std::string>(), "the adapter");
}

// What differs, by PEFT's names: " (r 4, not 8; init_lora_weights)", with the values where they are short. Empty if one
// of them is not an adapter.
std::string differing_fields(const nlohmann::json& a, const nlohmann::json& b) {
  constexpr std::size_t kShort = 48;  // characters of both
  if (!a.is_string() || !b.is_string()) return "";
  const auto then = nlohmann::json::parse(a.get<std::string>()), now = nlohmann::json::parse(b.get<std::string>());
  std::ostringstream fields;
  for (const auto& [name, value] : now.items()) {
    const auto before = then.value(name, nlohmann::json());
    if (before == value) continue;
    const std::string had = before.dump(), has = value.dump();
    fields << (fields.tellp() == 0 ? " (" : "; ") << name;
    if (had.size() + has.size() <= kShort) fields << " " << had << ", not " << has;
  }
  return fields.tellp() == 0 ? "" : fields.str() + ")";
}

constexpr std::uint64_t kBeyondBudget = 128 << 20;  // what measuring may take where the budget is too small anyway

// Throws Exception (kind usage). positions: those of the model; 0: nobody knows.
void check_options(const SessionOptions& options, const AdamW& adamw, std::int64_t positions) {
  if (options.micro_batch < 1 || options.micro_batches < 1 || options.sequence_length < 1)
    fail_usage("micro_batch, micro_batches and sequence_length are at least 1");
  if (options.device != "cpu" && options.device != "cuda")
    fail_usage("device is cpu or cuda, not \"" + options.device + "\"");
  if (options.sequence_length > positions && positions > 0)
    fail_usage("sequence_length " + std::to_string(options.sequence_length) + " exceeds the model's " +
               std::to_string(positions) + " positions");
  if (!options.train) return;
  if (options.clip && !(*options.clip > 0)) fail_usage("clip is a number above 0, or none");
  const auto is_decay = [](double beta) { return beta >= 0 && beta < 1; };
  if (!is_decay(adamw.beta1) || !is_decay(adamw.beta2)) fail_usage("AdamW's betas are at least 0 and less than 1");
  const auto is_amount = [](double value) { return value >= 0 && std::isfinite(value); };
  if (!is_amount(adamw.lr) || !is_amount(adamw.eps) || !is_amount(adamw.weight_decay))
    fail_usage("AdamW's lr, eps and weight_decay are numbers, 0 or more");
  if (options.commit_every < 0) fail_usage("commit_every is a number of steps, or 0");
  if (options.storage.empty() && ((options.commit_every != 0 && !options.commit_auto) || options.keep_store))
    fail_usage("commit_every and keep_store keep the state in folders of `storage`, and none is named");
  const auto is_share = [](double value) { return value >= 0 && value <= 1; };
  if (!is_share(options.deferred_share) || !is_share(options.device_update_share))
    fail_usage("deferred_share and device_update_share are from 0 to 1");
  if (!options.run.empty() && !nlohmann::json::parse(options.run, nullptr, false).is_object())
    fail_usage("run is a JSON object, not " + options.run);
}

// Who would rather have the step before than none says so.
io::Error with_the_way_back(io::Error error, const SessionOptions& options) {
  if (error.kind == io::ErrorKind::io && !options.go_back)
    error.detail +=
        "; or --go-back: where the newest generation cannot be read, the run goes on from the one before it";
  return error;
}

}  // namespace

Session::Impl::Impl(std::shared_ptr<LayeredModel> model_, SessionOptions options_, AdamW adamw_)
    : model(std::move(model_)),
      options(std::move(options_)),
      adamw(adamw_),
      torch_device(options.device == "cuda" ? torch::kCUDA : torch::kCPU),
      torch_memory(options.device == "cuda" ? DeviceMemory::cuda() : DeviceMemory::install()) {}

void Session::Impl::keep_source(std::shared_ptr<const SourceFolder> from, const Progress& progress) {
  source = std::move(from);
  source_hash = source->hash(progress);
}

void Session::Impl::set_up(const WeightSource& weights, const StoredSource& stored, const Progress& progress,
                           const Say& say) {
  if (options.loss.pairs() && options.loss.distills()) fail_usage("a loss of pairs has no teacher");
  if (options.loss.base_is_reference && (!options.loss.needs_reference() || !trains_adapters_alone(model->spec())))
    fail_usage(
        "base_is_reference: a reference that is the base is for dpo with adapters, where nothing else is "
        "trained; give each micro-batch its reference instead");
  check_options(options, adamw, model->spec().config.longest_sequence());
  if (options.train && has_experts_on_demand(model->spec()))
    fail_usage("a model with experts on demand is not trained");
  SessionOptions planned = options;
  swap::Store::Contents left;
  if (options.resume) {
    left = value_or_throw(swap::Store::inspect(storage_volume(options)));
    check_resumed(left.identity);
    planned.embedding_part = embedding_part_of(left.identity);
  }
  windows = window_steps(model->spec());
  if (windows != 0 && options.train && options.loss.pairs())
    fail_usage("projectors are those of the cross-entropy's gradient: a loss of pairs has none");
  const ProbedModel probed = probe();
  const auto plan_with = [&](std::uint64_t chunk_elements) {
    planned.chunk_elements = chunk_elements;
    for (planned.micro_batches = options.micro_batches;; planned.micro_batches /= 2) try {
        return plan_that_fits(model->spec(), planned, probed.needs);
      } catch (const Exception&) {
        if (!options.fewer_micro_batches || planned.micro_batches == 1) throw;
      }
  };
  plan = options.resume ? plan_to_resume(left.chunk_elements, options.host_memory, plan_with)
                        : plan_with(options.chunk_elements);
  if (options.resume && plan.layout->chunk_elements() != left.chunk_elements) {
    copied = copied_bytes(*plan.layout);
    check_write_limit();
    plan = cut_for(std::move(plan), storage_volume(options), left.chunk_elements, plan_with, say, progress);
    if (plan.layout->chunk_elements() == left.chunk_elements) copied = 0;
  }
  options.micro_batches = plan.arrangement.micro_batches;
  prove(plan, options.train);
  if (plan.stored) {
    check_write_limit();
    make_store(left);
  }
  if (plan.cache.storage != 0 && key_values == nullptr) make_key_value_store();
  state = std::make_unique<StreamedState>(model->spec().units, plan.packed, *plan.layout, plan.arrangement, store.get(),
                                          StreamedState::Options{.device = options.device,
                                                                 .train = options.train,
                                                                 .update_threads = options.update_threads,
                                                                 .chaos_seed = options.chaos_seed,
                                                                 .record = options.record});
  missed = nothing_missed();
  if (options.train && model->spec().config.experts.count != 0) expert_places.emplace(model->spec(), plan.packed);
  sparse_waiting.assign(plan.layout->chunks().size(), false);
  if (has_experts_on_demand(model->spec()))
    visits = std::make_unique<swap::VisitPlanner>(*plan.layout, plan.arrangement);
  else
    planner = std::make_unique<swap::Planner>(*plan.layout, plan.arrangement);
  if (options.resume) {
    restore(progress);
    leave_note(options.storage, true);  // what it goes on with is whole
  } else {
    // Where torch's memory of the host is the device's too, its cap is that of both.
    torch_share.set(torch_bytes() + (torch_device.is_cpu() ? plan.loading : 0));
    state->load(weights, stored, progress);
  }
  torch_memory.release_kept();
  torch_share.set(torch_bytes());
  torch_memory.reset_peak();
  lacks_first_values = !options.resume && begins_with_gradient(model->spec());
  if (plan.speculates) norms.emplace(*options.clip);
  if (!options.resume) client = options.remembered;
  if (plan.commit_every != 0 && !options.resume && !lacks_first_values) commit();
}

// Of the device, for what torch allocates.
std::uint64_t Session::Impl::torch_bytes() const {
  return options.device_memory - plan.arrangement.device_bytes() - torch_memory.fixed();
}

// The state that a session left is of this model and precision, and of the same run.
void Session::Impl::check_resumed(const std::string& identity) const {
  const auto then = nlohmann::json::parse(identity, nullptr, false);
  const auto now = nlohmann::json::parse(store_identity(model->spec(), options));
  const auto refuse = [&](const std::string& what) {
    throw Exception(
        io::Error{.kind = io::ErrorKind::usage,
                  .path = options.storage.front().string(),
                  .detail = what + ": go on as that run was, or begin anew (--fresh), which discards its steps"});
  };
  const auto differs = [&](const std::string& key) {
    const auto before = then.value(key, nlohmann::json()), here = now.value(key, nlohmann::json());
    if (key == "units" && before.is_null()) return false;  // of an earlier version
    return key == "adapter" ? !same_adapter(before, here) : before != here;
  };
  if (then.is_object() && differs("as")) refuse("holds the state of another run: its family (--as) is not this one's");
  for (const char* key :
       {"config", "units", "tiling", "adapter", "trainable", "base", "base_plain", "precision", "run"})
    if (!then.is_object() || differs(key))
      refuse("holds the state of another run: its " +
             std::string(key == std::string("config")                ? "model"
                         : key == std::string("units")               ? "model"
                         : key == std::string("tiling")              ? "cut of layers"
                         : std::string_view(key).starts_with("base") ? "base's precision"
                         : key == std::string("trainable")           ? "choice of what is trained"
                                                                     : key) +
             " is not this one's" +
             (key == std::string("adapter") && then.is_object()
                  ? differing_fields(then.value(key, nlohmann::json()), now.value(key, nlohmann::json()))
                  : ""));
}

void Session::Impl::restore(const Progress& progress) {
  try {
    state->restore(*store, progress);
  } catch (const Exception& failed) {
    if (failed.error().kind != io::ErrorKind::io) throw;
    throw Exception(with_the_way_back(failed.error(), options));
  }
  const auto found = nlohmann::json::parse(store->progress(), nullptr, false);
  if (!found.is_object() || !found.contains("step") || !found["step"].is_number_integer())
    throw Exception(io::Error{.kind = io::ErrorKind::corruption,
                              .path = options.storage.front().string(),
                              .detail = "the store does not say after which step it was committed"});
  steps = found["step"].get<std::int64_t>();
  updates_done = found.value("updates", std::int64_t{0});
  skipped = found.value("skipped", std::int64_t{0});
  const SteadyAdamW here = missed->adamw();
  missed = nothing_missed();
  if (found.contains("missed")) {
    const std::string where = options.storage.front().string();
    missed.emplace(*plan.layout, updates_done, found.value("missed", ""), where);
    if (missed->adamw() != here)
      throw Exception(io::Error{.kind = io::ErrorKind::usage,
                                .path = where,
                                .detail = "parts of the embedding have missed updates of an optimizer with other "
                                          "betas, eps, weight decay or seed: go on with those"});
  }
  client = found.value("client", "");
  const auto before = source_in(found);
  if (before && (source == nullptr || before->hash != source_hash))
    throw Exception(
        io::Error{.kind = io::ErrorKind::usage,
                  .path = options.storage.front().string(),
                  .detail = "the run whose state is here began with other parts beside the language model: " +
                            (source == nullptr ? "now there are none, and then those of "
                                               : source->folder().string() + " has changed since, or is not ") +
                            before->folder.string()});
  committed_steps = steps;
  planned_generation = store->generation();
  window_begun = found.value("window", std::int64_t{-1});
}

Session::Impl::~Impl() {
  state.reset();
  if (committed || store == nullptr) return;
  store->remove_files();  // first: without it, what lies beside it is nothing
  remove_note(options.storage);
}

// left: the store that is resumed. How many generations it keeps was decided when it was made.
void Session::Impl::make_store(const swap::Store::Contents& left) {
  swap::StoreOptions wanted = store_options(model->spec(), options, plan);
  if (options.resume) {
    wanted.identity = left.identity;
    wanted.generations = left.generations;
    auto opened = with_room([&] { return swap::Store::resume(wanted, *plan.layout); });
    if (!opened.ok()) throw Exception(with_the_way_back(opened.error(), options));
    store = std::move(opened).value();
    committed = true;  // it stays, whatever comes
    return;
  }
  if (options.fresh) discard_store(options.storage);
  refuse_left_store(options.storage);
  if (plan.cache.storage != 0) make_key_value_store();  // first: the state can do with the room of one copy
  auto made = with_room([&] { return swap::Store::create(wanted, *plan.layout); });
  if (!made.ok() && made.error().error_number == ENOSPC && options.commit_auto && plan.commit_every != 0) {
    plan.commit_every = 0;
    plan.speculates = false;
    made = with_room([&] { return swap::Store::create(store_options(model->spec(), options, plan), *plan.layout); });
  }
  if (!made.ok() && made.error().error_number == ENOSPC)
    fail_with_more(made.error(), plan.commit_every != 0
                                     ? "--durability export-only keeps one copy of the state, not two, "
                                       "and a crash loses the run"
                                     : "name larger drives, or more of them, as --storage");
  store = value_or_throw(std::move(made));
  leave_note(options.storage, plan.commit_every != 0);
}

// Nothing of it is left of a process that is killed.
void Session::Impl::make_key_value_store() {
  io::VolumeOptions volume = storage_volume(options);
  volume.name = "keys-and-values";
  volume.bytes = plan.cache.storage;
  auto made = value_or_throw(with_room([&] { return io::Volume::create(volume); }));
  made->remove_files();
  key_values = std::make_unique<KeyValueStore>(std::move(made), options.cache, plan.cache);
}

std::uint64_t Session::Impl::writes_of_next_step() const {
  // The deferred updates of the step before, if they wait, then this step's gradients and, before anything leaves the
  // session, all of its own updates.
  const std::uint64_t step = plan.writes.step();
  // A speculative step may be done twice, and commits what it begins with.
  const std::uint64_t twice =
      plan.speculates ? plan.writes.update + plan.writes.activations + plan.writes.commit : std::uint64_t{0};
  // Sparse chunks that catch up, in the step and before anything leaves the session, may be all of them.
  return (pending ? plan.writes.deferred : 0) + step + twice + 2 * plan.writes.sparse +
         plan.writes.commit * (plan.commit_every != 0 ? 2 : 1) +
         (window_ended() ? step + plan.writes.window + plan.writes.commit : 0);
}

void Session::Impl::check_write_limit() const {
  // First values of a gradient take a pass that writes what a step does.
  const bool one_more = !options.resume && options.train && begins_with_gradient(model->spec());
  const std::uint64_t loading = copied + plan.writes.load;
  const std::uint64_t least = loading + writes_of_next_step() * (one_more ? 2 : 1);
  if (options.write_limit != 0 && least > options.write_limit)
    fail_usage("--max-tb-written allows no step: loading writes " + std::to_string(loading) +
               " bytes to storage and a step " + std::to_string(least - loading) + "; the smallest that works is " +
               terabytes(least));
}

ProbedModel Session::Impl::probe() {
  const auto measure = [&](std::int64_t micro_batch, std::uint64_t cap) -> std::optional<ProbedModel> {
    torch_memory.release_kept();
    torch_share.set(cap);
    try {
      return StageProbe(*model, torch_memory, torch_device)
          .measure(micro_batch, options.sequence_length, options.train, options, micro_batches_together(options));
    } catch (const c10::Error& error) {
      if (!is_out_of_memory(error)) throw;
      return std::nullopt;
    }
  };
  std::optional<ProbedModel> probed = measure(options.micro_batch, options.device_memory);
  // Too small a budget: measure with a little more, and where that is too little still, fewer sequences, so that the
  // refusal can name the smallest budget that works.
  const std::uint64_t beyond = options.device_memory + kBeyondBudget;
  bool estimated = false;  // what is estimated is too large for the budget: it was tried
  for (std::int64_t fewer = options.micro_batch; !probed && fewer >= 1; fewer /= 2)
    if ((probed = measure(fewer, beyond))) {
      scale_micro_batch(*probed, options.micro_batch, fewer);
      estimated = fewer != options.micro_batch;
    }
  if (!probed && (probed = measure(1, options.device == "cuda" ? ~std::uint64_t{0} / 2 : memory_available())))
    scale_micro_batch(*probed, options.micro_batch, 1);
  torch_memory.release_kept();
  if (probed && estimated) probed->needs.stage_peak = std::max(probed->needs.stage_peak, options.device_memory);
  if (!probed)
    throw Exception(io::ErrorKind::memory,
                    "this machine has no memory to compute one sequence in the model's largest layer: use a smaller "
                    "--sequence-length, or a machine with more");
  return *std::move(probed);
}

}  // namespace tierflow

#include "runtime/program/run_summary.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "runtime/base/machine.h"
#include "runtime/program/run_result.h"

namespace tierflow {
namespace {

using nlohmann::json;

// "200 steps", or where earlier processes made some of them "135 steps, 66 to 200,".
std::string steps_text(std::int64_t all, std::int64_t here) {
  return here >= all ? fmt::format("{} steps", all) : fmt::format("{} steps, {} to {},", here, all - here + 1, all);
}

json predicted_json(const RunSummary& run, const TrainingLog& log) {
  if (!run.prediction) return {};
  json lanes;
  for (int lane = 0; lane < swap::kLanes; ++lane)
    lanes[swap::lane_name(static_cast<swap::Lane>(lane))] = {{"bytes", run.prediction->bytes[lane]},
                                                             {"busy_s", run.prediction->step.busy_seconds[lane]}};
  return {{"step_s", run.prediction->step_seconds},
          {"measured_step_s", log.typical_step_seconds()},
          {"lanes", lanes},
          {"device_memory_peak", run.predicted_memory.device},
          {"host_memory", run.predicted_memory.host},
          {"peak_rss", run.predicted_memory.process}};
}

}  // namespace

void say_what_is_durable(const TrainOptions& options, const Session& session, std::int64_t steps, bool resumed,
                         TrainingLog& log) {
  const int every = session.commit_every();
  if (session.steps() >= steps)
    log.say(fmt::format("the run is finished, after step {} of {}: {}", session.steps(), steps,
                        options.no_export ? "a larger --steps goes on" : "its result is written"));
  else if (resumed)
    log.say(fmt::format("resumed after step {} of {}: {}", session.steps(), steps, options.storage.front().string()));
  if (every != 0 && session.steps() < steps)
    log.say(fmt::format("durability: {} committed in {}; after a crash the same command goes on",
                        every == 1 ? "every step is" : fmt::format("every {} steps are", every),
                        options.storage.front().string()));
  else
    log.say(std::string("durability: ") +
            (options.storage.empty()        ? "none, without --storage"
             : options.durability == "auto" ? "none, --storage has no room for a second copy of the state"
                                            : "export-only, no step is committed") +
            (resumed ? ": a crash costs all steps from here on" : ": a crash loses the run"));
  log.object({{"durability", {{"commit_every", every}, {"resumed_at", session.steps()}}}});
}

std::string result_of_text_model(const TrainOptions& options, const ModelSpec& spec) {
  if (!options.config.empty())
    return fmt::format("the result is a {}, without the other parts", spec.config.architecture);
  if (last_file(options) != std::string("config.json"))
    return "its adapters are for the whole model, as PEFT names them there";
  return "the result has the other parts as they are";
}

void say_which_is_best(const TrainOptions& options, const RunRecord& record, bool exported,
                       std::optional<std::pair<std::int64_t, double>> result, TrainingLog& log) {
  const auto& [loss, step, since] = record.best;
  if (result && !(loss < result->second)) {
    log.say(fmt::format("the lowest held-out loss is the result's, after step {}", result->first));
    log.object({{"best", {{"step", result->first}, {"held_out_loss", result->second}, {"folder", options.out}}}});
  } else if (std::isfinite(loss)) {
    const bool here = exported && record.exported == step;
    const json folder = here ? json((options.out / fmt::format("checkpoint-{}", step)).string()) : json();
    log.say(fmt::format("the lowest held-out loss was {}, after step {}: {}", loss_text(loss), step,
                        here ? folder.get<std::string>()
                             : "its model is not in " + options.out.string() +
                                   "; it was not written, or in the --out of another command"));
    log.object({{"best", {{"step", step}, {"held_out_loss", loss}, {"folder", folder}}}});
  } else {
    log.say("no model was kept as the best: no evaluation between steps had a loss");
  }
}

void report(const RunSummary& run, const Session& session, TrainingLog& log) {
  const MemoryUse memory = session.memory();
  json lanes;
  for (int i = 0; i < swap::kLanes; ++i) {
    const auto counters = session.lanes()[i];
    lanes[swap::lane_name(static_cast<swap::Lane>(i))] = {{"bytes", counters.bytes}, {"busy_s", counters.busy_seconds}};
  }
  json storage;
  if (const auto mode = session.storage_mode())
    storage = {{"engine", io::engine_name(mode->engine)},
               {"direct", mode->direct},
               {"registered_buffers", mode->registered_buffers},
               {"alignment", mode->alignment}};
  const auto or_null = [](double loss) { return std::isfinite(loss) ? json(loss) : json(); };
  const bool written = run.usable && !run.out.empty();
  json summary{{"steps", run.steps},
               {"steps_of_this_process", log.steps()},
               {"tokens_per_s", log.tokens_per_second()},
               {"training_s", log.training_seconds()},
               {"loss", or_null(run.last_loss)},
               {"held_out_loss_before", or_null(run.held_out_before)},
               {"held_out_loss_after", or_null(run.held_out_after)},
               {"skipped_steps", session.skipped_steps()},
               {"speculative_steps", log.speculative_steps()},
               {"undone_steps", log.undone_steps()},
               {"parameters", session.parameters()},
               {"limit", log.limiting_lane(session)},
               {"device_memory_peak", memory.device_peak},
               {"device_memory_budget", memory.device_budget},
               {"host_memory", memory.host_used},
               {"host_memory_budget", memory.host_budget},
               {"storage_bytes", memory.storage_bytes},
               {"tb_written", 1e-12 * static_cast<double>(session.bytes_written())},
               {"tb_written_per_step", log.terabytes_a_step()},
               {"storage_mode", storage},
               {"peak_rss", resident_set_peak()},
               {"lanes", lanes},
               {"predicted", predicted_json(run, log)},
               {"out", written ? json(std::filesystem::absolute(run.out).string()) : json()}};
  const bool has_experts = std::isfinite(log.experts_touched());
  if (has_experts)
    summary["experts_touched"] = {{"mean", log.experts_touched()},
                                  {"least", log.fewest_experts_touched()},
                                  {"gradient_bytes_left_out", log.gradient_bytes_left_out()}};
  const TrainingLog::EmbeddingUse& embedding = log.embedding();
  const double share = embedding.bytes / embedding.bytes_of_all;
  if (embedding.bytes_of_all > 0)
    summary["embedding"] = {{"rows_a_step", embedding.rows / static_cast<double>(log.steps())}, {"share_moved", share}};
  log.object({{"summary", summary}});
  const auto moved = [&](const char* lane) { return human_bytes(lanes[lane]["bytes"].get<std::uint64_t>()); };
  if (log.steps() != 0)
    log.say(fmt::format("\n{} in {:.{}f} s: {}, limited by {}", steps_text(run.steps, log.steps()),
                        log.training_seconds(), log.training_seconds() < 10 ? 2 : 1,
                        speed_text(log.tokens_per_second()), log.limiting_lane(session)));
  if (run.prediction && run.steps > 1)
    log.say(fmt::format("predicted {:.3g} s a step, measured {:.3g}: {:+.1f}%", run.prediction->step_seconds,
                        log.typical_step_seconds(),
                        100 * (run.prediction->step_seconds / log.typical_step_seconds() - 1)));
  if (run.evaluated)
    log.say(fmt::format("held-out loss {} before{}", loss_text(run.held_out_before),
                        run.usable && !std::isfinite(run.held_out_after)
                            ? ", and no evaluation after"
                            : ", " + loss_text(run.held_out_after) + " after"));
  if (run.evaluated && run.held_out_after > run.held_out_before)
    log.say("warning: the held-out loss rose; a lower --lr or fewer steps may do better");
  log.say(fmt::format("device memory {} at most, budget {}; host memory {}, budget {}; process {} at most",
                      human_bytes(memory.device_peak), human_bytes(memory.device_budget), human_bytes(memory.host_used),
                      human_bytes(memory.host_budget), human_bytes(resident_set_peak())));
  log.say(fmt::format("moved by the steps: storage {} read, {} written; {} to the device, {} from it; {} updated",
                      moved("disk_read"), moved("disk_write"), moved("upload"), moved("download"), moved("update")));
  if (has_experts)
    log.say(
        fmt::format("experts with tokens in a step: {:.1f}% of a layer's, {:.1f}% at least; {} of the others' "
                    "gradients did not move",
                    100 * log.experts_touched(), 100 * log.fewest_experts_touched(),
                    human_bytes(static_cast<std::uint64_t>(log.gradient_bytes_left_out()))));
  if (embedding.bytes_of_all > 0)
    log.say(fmt::format("embedding: {:.0f} rows in a step; storage moved {} of it a step, {:.2g}% of what all takes",
                        embedding.rows / static_cast<double>(log.steps()),
                        human_bytes(static_cast<std::uint64_t>(embedding.bytes / static_cast<double>(log.steps()))),
                        100 * share));
  if (storage.is_object())
    log.say(fmt::format("storage wrote {:.3g} TB in this run with loading and commits, {:.3g} TB a step",
                        1e-12 * static_cast<double>(session.bytes_written()), log.terabytes_a_step()));
  if (log.speculative_steps() + log.undone_steps() > 0)
    log.say(fmt::format("{} steps updated ahead of the norm, {} of them were undone: it clipped",
                        log.speculative_steps() + log.undone_steps(), log.undone_steps()));
  if (session.skipped_steps() > 0)
    log.say(fmt::format("{} steps were skipped: a loss or gradient was not finite", session.skipped_steps()));
  if (!run.usable) return;
  if (run.out.empty())
    log.say("result: in the store; `tierflow export --storage ... --out ...` writes it as a model folder");
  else
    log.say("result: " + std::filesystem::absolute(run.out).string());
}

}  // namespace tierflow

#include "runtime/program/samples.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "runtime/base/exception.h"
#include "runtime/base/files.h"
#include "runtime/base/machine.h"
#include "runtime/base/signals.h"
#include "runtime/data/prompt_tokenizer.h"
#include "runtime/program/prompts.h"

namespace tierflow {

using nlohmann::json;

Samples::Samples(const TrainOptions& options, const ModelSpec& spec) : every_(options.sample_every) {
  if (every_ == 0) return;
  text_ = data_options(options, spec, temporary_folder());
  generation_.max_new_tokens = options.max_new_tokens;
  if (!options.model.empty()) generation_.stop_tokens = read_generation_config(options.model).stop_tokens;
  prompts_ = PromptTokenizer(text_).encode(read_prompts(options.sample_prompts, {}));
}

void Samples::set_aside(SessionOptions& session, const ModelSpec& spec, TrainingLog& log) const {
  if (every_ == 0) return;
  const auto at_once = std::min<std::int64_t>(session.micro_batches, std::ssize(prompts_));
  const GenerationShape shape = GenerationShape::of(spec, prompts_, generation_, at_once, session.sequence_length);
  const auto refuse = [](const std::string& what) { throw Exception(io::ErrorKind::usage, what); };
  if (at_once > session.micro_batch * session.sequence_length)
    refuse(fmt::format("{} of --sample-prompts at once are more than a micro-batch has tokens: give fewer", at_once));
  if (shape.cache >= session.host_memory)
    refuse(
        fmt::format("keys and values of the samples take {} of the host's {}: give more --host-memory, shorter "
                    "--sample-prompts or fewer --max-new-tokens",
                    human_bytes(shape.cache), human_bytes(session.host_memory)));
  session.host_memory -= shape.cache;
  session.workspace += shape.workspace;
  log.say(fmt::format("samples: keys and values take {} of --host-memory, their use {} of --device-memory",
                      human_bytes(shape.cache), human_bytes(shape.workspace)));
}

void Samples::after_step(std::int64_t step, Session& session, TrainingLog& log) const {
  if (every_ == 0 || step % every_ != 0) return;
  const auto none = [&](const char* why) {
    log.say(fmt::format("warning: there are no samples after step {}: {}", step, why));
  };
  try {
    show(step, generated(session, log), log);
  } catch (const Stopped&) {  // the run's loop sees it too, and ends with its state kept
  } catch (const Exception& error) {
    if (!session.intact()) throw;
    none(error.what());
  } catch (const c10::OutOfMemoryError& error) {  // for what is computed between passes
    none(error.what_without_backtrace());
  }
  log.no_step_moved_that(session);
}

std::vector<Generated> Samples::generated(Session& session, TrainingLog& log) const {
  std::vector<Generated> found(prompts_.size());
  std::uint64_t tokens = 0;
  const std::uint64_t most = prompts_.size() * static_cast<std::uint64_t>(generation_.max_new_tokens);
  generate(session, prompts_, generation_,
           {.before_pass =
                [&] {
                  throw_if_stopped();
                  log.progress("generating samples", tokens, most);
                },
            .on_token = [&](std::size_t, std::int64_t) { ++tokens; },
            .on_end = [&](std::size_t prompt, const Generated& one) { found[prompt] = one; }});
  return found;
}

void Samples::show(std::int64_t step, const std::vector<Generated>& found, TrainingLog& log) const {
  PromptTokenizer tokenizer(text_);
  tokenizer.ignore_stops();
  auto samples = json::array();
  for (std::size_t prompt = 0; prompt < found.size(); ++prompt) {
    // Bytes that are no text are replaced.
    const std::string quoted =
        json(tokenizer.decode(found[prompt].tokens)).dump(-1, ' ', false, json::error_handler_t::replace);
    const char* reason = found[prompt].reason == FinishReason::stop ? "stop" : "length";
    log.say(fmt::format("step {}: sample {} ({}): {}", step, prompt + 1, reason, quoted));
    samples.push_back({{"prompt", prompt + 1},
                       {"text", json::parse(quoted)},
                       {"tokens", found[prompt].tokens},
                       {"finish_reason", reason}});
  }
  log.object({{"step", step}, {"samples", samples}});
}

}  // namespace tierflow

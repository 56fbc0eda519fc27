#include "runtime/program/samples.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "runtime/base/exception.h"
#include "runtime/base/signals.h"
#include "runtime/data/prompt_tokenizer.h"
#include "runtime/device/device_memory.h"

namespace tierflow {

using nlohmann::json;

void Samples::after_step(std::int64_t step, Session& session, TrainingLog& log) const {
  if (prompts_.every() == 0 || step % prompts_.every() != 0) return;
  const auto none = [&](const char* why) {
    log.say(fmt::format("warning: there are no samples after step {}: {}", step, why));
  };
  try {
    show(step, generated(session, log), log);
  } catch (const Stopped&) {  // the run's loop sees it too, and ends with its state kept
  } catch (const Exception& error) {
    if (!session.intact()) throw;
    none(error.what());
  } catch (const c10::Error& error) {  // for what is computed between passes
    if (!is_out_of_memory(error)) throw;
    none(error.what_without_backtrace());
  }
  log.no_step_moved_that(session);
}

std::vector<Generated> Samples::generated(Session& session, TrainingLog& log) const {
  std::vector<Generated> found(prompts_.prompts().size());
  std::uint64_t tokens = 0;
  // So much a pass writes at most, and the run's limit leaves room for a step behind it.
  const auto within_limit = [&] {
    const std::uint64_t limit = session.options().write_limit, of_pass = session.plan().cache.storage;
    if (limit != 0 && of_pass != 0 && session.bytes_written_after_next_step() + of_pass > limit)
      fail_usage("writing their keys and values to storage might pass --max-tb-written");
  };
  const std::uint64_t most =
      prompts_.prompts().size() * static_cast<std::uint64_t>(prompts_.generation().max_new_tokens);
  generate(session, prompts_.prompts(), prompts_.generation(),
           {.before_pass =
                [&] {
                  throw_if_stopped();
                  within_limit();
                  log.progress("generating samples", tokens, most);
                },
            .on_token = [&](std::size_t, std::int64_t) { ++tokens; },
            .on_end = [&](std::size_t prompt, const Generated& one) { found[prompt] = one; }});
  return found;
}

void Samples::show(std::int64_t step, const std::vector<Generated>& found, TrainingLog& log) const {
  PromptTokenizer tokenizer(prompts_.text());
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

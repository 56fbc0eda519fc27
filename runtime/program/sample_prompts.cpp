#include "runtime/program/sample_prompts.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "runtime/base/exception.h"
#include "runtime/base/files.h"
#include "runtime/base/machine.h"
#include "runtime/data/prompt_tokenizer.h"
#include "runtime/program/prompts.h"

namespace tierflow {

SamplePrompts::SamplePrompts(const TrainOptions& options, const ModelSpec& spec) : every_(options.sample_every) {
  if (every_ == 0) return;
  text_ = data_options(options, spec, temporary_folder());
  generation_.max_new_tokens = options.max_new_tokens;
  if (!options.model.empty()) generation_.stop_tokens = read_generation_config(options.model).stop_tokens;
  prompts_ = PromptTokenizer(text_).encode(read_prompts(options.sample_prompts, {}));
}

void SamplePrompts::set_aside(SessionOptions& session, const ModelSpec& spec, const Say& say) const {
  if (every_ == 0) return;
  const auto at_once = std::min<std::int64_t>(session.micro_batches, std::ssize(prompts_));
  const GenerationShape shape = GenerationShape::of(spec, prompts_, generation_, at_once, session.sequence_length);
  const auto refuse = [](const std::string& what) { fail_usage(what); };
  if (at_once > session.micro_batch * session.sequence_length)
    refuse(fmt::format("{} of --sample-prompts at once are more than a micro-batch has tokens: give fewer", at_once));
  session.cache = shape.cache;
  session.workspace += shape.workspace;
  say(fmt::format("samples: keys and values of {} at once take {}, their use {} of --device-memory", at_once,
                  human_bytes(shape.cache.bytes()), human_bytes(shape.workspace)));
}

}  // namespace tierflow

// `tierflow eval`: the loss of a model on text.
#include <fmt/format.h>

#include <cmath>
#include <iostream>
#include <nlohmann/json.hpp>

#include "runtime/base/exception.h"
#include "runtime/base/files.h"
#include "runtime/base/signals.h"
#include "runtime/program/run_common.h"
#include "runtime/program/train.h"

namespace tierflow {

using nlohmann::json;

int run_eval(const EvalOptions& options) {
  watch_signals();
  TrainingLog log(options.log_json, false);
  const Model model = load_with(options.model, options.adapter, options.base_precision);
  const ModelSpec& spec = model.spec();
  const Dataset data = prepare_data(data_options(options, spec, temporary_folder()), log);
  const std::uint64_t device_fixed = prepare_torch(device_of(options), options.threads);
  SessionOptions settings = session_settings(options, device_fixed, [&](const std::string& line) { log.say(line); });
  settings.train = false;
  announce_device(options, settings, log);
  Session session(model, settings, {}, [&](const char* phase, std::uint64_t done, std::uint64_t total) {
    throw_if_stopped();
    log.progress(phase, done, total);
  });
  log.begin();
  std::int64_t count = data.training_sequences();
  if (options.max_sequences > 0) count = std::min(count, options.max_sequences);
  double sum = 0;
  std::int64_t targets = 0;
  for (std::int64_t first = 0; first < count; first += options.micro_batch) {
    throw_if_stopped();
    const MicroBatch batch = micro_batch(data, Sequences::training, first, std::min(options.micro_batch, count - first),
                                         options.sequence_length);
    const std::int64_t tokens = batch.target_tokens();
    sum += session.evaluate({batch}) * static_cast<double>(tokens);
    targets += tokens;
    log.progress("evaluating", first + options.micro_batch, std::max(count, first + options.micro_batch));
  }
  const double loss = sum / static_cast<double>(std::max<std::int64_t>(1, targets));
  const json result{{"loss", loss}, {"perplexity", std::exp(loss)}, {"tokens", targets}, {"sequences", count}};
  log.object(result);
  if (!std::isfinite(loss))
    throw Exception(
        io::ErrorKind::numeric,
        fmt::format("the loss is not finite over {} tokens: the weights of {}, or what they compute, are no "
                    "numbers; look at where they come from",
                    targets, options.model.string()));
  if (options.json)
    std::cout << result.dump() << std::endl;
  else
    std::cout << fmt::format("loss {:.6f}  perplexity {:.4f}  ({} tokens in {} sequences)", loss, std::exp(loss),
                             targets, count)
              << std::endl;
  return 0;
}

}  // namespace tierflow

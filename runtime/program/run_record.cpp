#include "runtime/program/run_record.h"

#include <nlohmann/json.hpp>

namespace tierflow {

void BestEvaluation::take(std::int64_t at_step, double found, double threshold) {
  const double least = std::isfinite(loss) ? loss : INFINITY;
  since = found < least - threshold ? 0 : since + 1;
  if (!(found < least)) return;
  loss = found;
  step = at_step;
}

std::string RunRecord::json() const {
  return nlohmann::json{{"configuration", configuration},
                        {"model", model},
                        {"chat_template", chat_template},
                        {"skipped_in_a_row", skipped_in_a_row},
                        {"held_out_before", held_out_before},
                        {"last_loss", last_loss},
                        {"best_loss", best.loss},
                        {"best_step", best.step},
                        {"without_better", best.since},
                        {"evaluated", evaluated},
                        {"evaluated_sequences", evaluated_sequences},
                        {"saved", exported},
                        {"saved_loss", exported_loss}}
      .dump();
}

RunRecord RunRecord::parse(const std::string& json) {
  const auto then = nlohmann::json::parse(json, nullptr, false);
  const auto number = [&](const char* key) {
    const auto found = then.is_object() ? then.find(key) : then.end();
    return then.is_object() && found != then.end() && found->is_number() ? found->get<double>() : NAN;
  };
  const auto count = [&](const char* key) -> std::int64_t {
    return std::isfinite(number(key)) ? std::llround(number(key)) : 0;
  };
  const auto text = [&](const char* key) -> std::string {
    const auto found = then.is_object() ? then.find(key) : then.end();
    return then.is_object() && found != then.end() && found->is_string() ? found->get<std::string>() : "";
  };
  return {.configuration = text("configuration"),
          .model = text("model"),
          .chat_template = text("chat_template"),
          .skipped_in_a_row = count("skipped_in_a_row"),
          .held_out_before = number("held_out_before"),
          .last_loss = number("last_loss"),
          .best = {.loss = number("best_loss"), .step = count("best_step"), .since = count("without_better")},
          .evaluated = count("evaluated"),
          .evaluated_sequences = count("evaluated_sequences"),
          .exported = count("saved"),
          .exported_loss = number("saved_loss")};
}

}  // namespace tierflow

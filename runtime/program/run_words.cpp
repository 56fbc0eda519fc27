// What a run is going to do, in words.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "runtime/program/adapter_options.h"
#include "runtime/program/loss_options.h"
#include "runtime/program/options.h"

namespace tierflow {

std::string describe(const TrainOptions& o) {
  std::vector<std::string> data;
  for (const auto& path : o.data) data.push_back(path.string());
  std::string text = o.config.empty() ? fmt::format("training {}", o.model.string())
                                      : fmt::format("training {} from random weights", o.config.string());
  if (!o.adapter.empty())
    text += fmt::format(" with the adapters of {}", o.adapter.string());
  else if (o.method == "lora")
    text += fmt::format(" with adapters of rank {}, alpha {}", o.lora.rank, o.lora.alpha);
  if (o.method == "galore")
    text += fmt::format(" with gradients projected to rank {}, anew every {} steps, scale {}", o.galore.rank,
                        o.galore.windows.steps, o.galore.windows.scale);
  if (o.base_precision != "bf16" && o.base_precision != kOwnFormat)
    text += fmt::format(" over {} weights", o.base_precision);
  text += fmt::format(" on {}: ", fmt::join(data, ", "));
  if (loss_rule(o).pairs()) text += fmt::format("{} with beta {}, ", o.loss, o.beta);
  if (!o.distill.empty())
    text += fmt::format("{} x cross-entropy + {} x the divergence from the teacher of {} at temperature {}, ",
                        o.kd.ce_alpha, o.kd.alpha, o.distill.string(), o.kd.temperature);
  text += o.steps != 0 ? fmt::format("{} steps", o.steps) : fmt::format("{} epochs", o.epochs);
  text += fmt::format(" of {} x {} {} of {} tokens; AdamW with learning rate {} ({}", o.micro_batches, o.micro_batch,
                      loss_rule(o).pairs() ? "pairs" : "sequences", o.sequence_length, highest_lr(o), o.lr_schedule);
  if (o.warmup != 0) text += fmt::format(", warm-up {} steps", o.warmup);
  text += fmt::format("), weight decay {}, clip {}; {}, seed {}; ", o.weight_decay,
                      o.clip ? fmt::format("{}", *o.clip) : "none", o.precision, o.seed);
  text += o.no_export ? std::string("the result stays in the store") : "result in " + o.out.string();
  return text + (o.log_json.empty() ? ". --log-json keeps all options and every step"
                                    : ". All options: first line of " + o.log_json.string());
}

}  // namespace tierflow

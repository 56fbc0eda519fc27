#include "runtime/program/training_spec.h"

#include <fmt/format.h>

#include "runtime/base/exception.h"
#include "runtime/program/loss_options.h"

namespace tierflow {

std::vector<std::pair<std::string, double>> learning_rate_scales(const TrainOptions& options) {
  std::vector<std::pair<std::string, double>> scales = options.lr_scales;
  if (options.loraplus_lr_ratio != 1) scales.emplace_back("lora_B", options.loraplus_lr_ratio);
  return scales;
}

ModelSpec training_spec(const TrainOptions& options) {
  ModelSpec spec = read_model_spec(options.config.empty() ? options.model / "config.json" : options.config);
  if (options.sequence_length > spec.config.max_positions && spec.config.max_positions > 0)
    throw Exception(io::ErrorKind::usage, fmt::format("--sequence-length {} exceeds the model's {} positions",
                                                      options.sequence_length, spec.config.max_positions));
  if (options.method == "lora") {
    set_base_format(spec, parse_weight_format(options.base_precision));
    add_adapters(spec, options.adapter.empty() ? options.lora : read_adapter_config(options.adapter));
    check_first_factors(spec);
  } else {
    set_trainable(spec, options.trained);
  }
  set_learning_rates(spec, learning_rate_scales(options));
  if (loss_rule(options).pairs()) remove_dropout(spec);
  return spec;
}

}  // namespace tierflow

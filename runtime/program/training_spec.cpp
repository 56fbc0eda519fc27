#include "runtime/program/training_spec.h"

#include <fmt/format.h>

#include "runtime/base/exception.h"
#include "runtime/checkpoint/safetensors.h"
#include "runtime/planning/stored_model.h"
#include "runtime/program/adapter_options.h"
#include "runtime/program/loss_options.h"
#include "runtime/spec/own_format.h"

namespace tierflow {
namespace {

void set_base(ModelSpec& spec, const TrainOptions& options) {
  const bool own = options.base_precision == kOwnFormat;
  if (own && options.model.empty()) return;  // random weights
  WeightFormat format = own ? WeightFormat::bf16 : parse_weight_format(options.base_precision);
  std::vector<std::string> plain;
  if (own || is_unconverted(format)) {
    if (options.model.empty())
      fail_usage("--base-precision " + options.base_precision + " keeps what a folder holds: give it as --model");
    const Checkpoint folder = Checkpoint::open(options.model);
    const auto has = [&](const std::string& name, WeightFormat kept) { return folder.has(name, kept); };
    if (own) format = own_format(spec, has);
    if (is_unconverted(format)) plain = plain_beside(spec, format, has);
  }
  set_base_format(spec, format, plain);
}

}  // namespace

TrainOptions with_base_of(const Folders& state, TrainOptions options) {
  if (options.method == "lora" && options.base_precision == kOwnFormat)
    options.base_precision = weight_format_name(open_stored_model(state).spec.base_format);
  return options;
}

std::vector<std::pair<std::string, double>> learning_rate_scales(const TrainOptions& options) {
  std::vector<std::pair<std::string, double>> scales = options.lr_scales;
  if (options.loraplus_lr_ratio != 1) scales.emplace_back("lora_B", options.loraplus_lr_ratio);
  return scales;
}

ModelSpec training_spec(const TrainOptions& options) {
  ModelSpec spec = options.config.empty() ? read_folder_spec(options.model, {}, options.read_as)
                                          : read_model_spec(options.config, {}, options.read_as);
  if (const std::int64_t most = spec.config.longest_sequence(); options.sequence_length > most && most > 0)
    fail_usage(fmt::format("--sequence-length {} exceeds the model's {} positions", options.sequence_length, most));
  if (options.method == "lora") {
    set_base(spec, options);
    add_adapters(spec, options.adapter.empty() ? options.lora : read_adapter_config(options.adapter));
    if (options.adapter.empty()) expect_patterns_fit(spec, options.lora);
    check_first_factors(spec);
  } else {
    set_trainable(spec, options.trained);
    if (options.method == "galore") {
      add_adapters(spec, galore_config(options));
      expect_patterns_fit(spec, galore_config(options));
    }
  }
  set_learning_rates(spec, learning_rate_scales(options));
  if (options.method == "galore" && loss_rule(options).distills())
    fail_usage("--method galore projects the gradient of the cross-entropy: it has no --distill");
  if (!loss_rule(options).pairs()) return spec;
  if (options.method == "galore")
    fail_usage("--method galore projects the gradient of the cross-entropy: it has no --loss " + options.loss);
  if (begins_with_gradient(spec))
    fail_usage("--init " + adapter_init_name(options.lora) + " takes the gradient of the cross-entropy: with --loss " +
               options.loss + " choose another --init");
  remove_dropout(spec);
  return spec;
}

}  // namespace tierflow

#include "runtime/program/run_common.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "runtime/base/exception.h"
#include "runtime/base/machine.h"
#include "runtime/data/data_json.h"
#include "runtime/device/device_memory.h"
#include "runtime/program/adapter_options.h"
#include "runtime/program/data_report.h"
#include "runtime/program/loss_options.h"
#include "runtime/program/training_spec.h"
#include "runtime/spec/own_format.h"

namespace tierflow {
namespace {

// What the card is, said once; the log's steps then tell what it does.
void watch_gpu(TrainingLog& log) {
  const auto info = swap::cuda_device_info(0);
  if (!info.ok()) return;
  const swap::CudaDeviceInfo& card = info.value();
  auto gpu = GpuMonitor::open(card.pci_bus);
  const std::string link = gpu == nullptr ? "" : gpu->link(), capability = fmt::format("{}.{}", card.major, card.minor);
  log.say(fmt::format("device: {}, compute capability {}, {}{}{}", card.name, capability, human_bytes(card.bytes),
                      link.empty() ? "" : ", ", link));
  log.object({{"device",
               {{"name", card.name},
                {"compute_capability", capability},
                {"bytes", card.bytes},
                {"pci_bus", card.pci_bus},
                {"link", link}}}});
  log.watch(std::move(gpu));
}

}  // namespace

std::uint64_t prepare_torch(const std::string& device, int threads) {
  DeviceMemory::install();
  if (threads > 0) at::set_num_threads(threads);
  return device == "cuda" ? DeviceMemory::cuda().fixed() : 0;
}

Model load_with(const std::filesystem::path& model, const std::filesystem::path& adapter,
                const std::string& base_precision, const std::string& as) {
  const Model base = load(model, as);
  const WeightFormat format =
      base_precision == kOwnFormat ? own_format(base.spec(), base.stored.has) : parse_weight_format(base_precision);
  return with_base_format(adapter.empty() ? base : with_adapters(base, adapter), format);
}

Model training_model(const TrainOptions& options, const ModelSpec& spec) {
  if (!options.config.empty()) return from_config(spec, options.seed);
  Model model = load(options.model, options.read_as);
  if (options.method == "lora") {
    model = with_base_format(model, spec.base_format);
    model = options.adapter.empty() ? with_adapters(model, options.lora, options.seed)
                                    : with_adapters(model, options.adapter);
  } else {
    model = with_trainable(model, options.trained);
    if (options.method == "galore") model = with_adapters(model, galore_config(options), options.seed);
  }
  model = with_learning_rates(model, learning_rate_scales(options));
  return loss_rule(options).pairs() ? without_dropout(model) : model;
}

void say_if_for_other_weights(const std::filesystem::path& adapter, const std::filesystem::path& model,
                              const std::string& as, TrainingLog& log) {
  if (adapter.empty() || !is_for_other_weights(adapter, model, as)) return;
  log.say(fmt::format(
      "warning: the adapters of {} were trained over other weights than those of {}: over another model, or "
      "over one that was trained or quantised since",
      printable(adapter.string()), printable(model.string())));
}

namespace {

constexpr std::uint64_t kLargestFile = 16 << 20;

// The text of the folder's chat template; empty if it has none, or several.
std::string chat_template_of(const std::filesystem::path& folder) {
  std::error_code ignored;
  const std::filesystem::path own = folder / "chat_template.jinja", config = folder / "tokenizer_config.json";
  if (std::filesystem::is_regular_file(own, ignored)) return read_text(own, kLargestFile);
  if (!std::filesystem::is_regular_file(config, ignored)) return "";
  const auto root = nlohmann::json::parse(read_text(config, kLargestFile), nullptr, false);
  const auto found = root.is_object() ? root.value("chat_template", nlohmann::json()) : nlohmann::json();
  return found.is_string() ? found.get<std::string>() : "";
}

}  // namespace

void say_what_differs(const std::filesystem::path& adapter, const DataChoice& options, TrainingLog& log) {
  say_if_for_other_weights(adapter, options.model, options.read_as, log);
  if (adapter.empty() || !options.chat_template.empty()) return;
  const std::string trained = chat_template_of(adapter);
  if (trained.empty() || trained == chat_template_of(options.model)) return;
  log.say(
      fmt::format("warning: {} has another chat template than {}, whose own is taken: --chat-template takes the other",
                  printable(adapter.string()), printable(options.model.string())));
}

void say_if_bytes_are_tokens(const DataOptions& options, TrainingLog& log) {
  if (options.lacks_tokenizer.empty()) return;
  log.say(
      fmt::format("warning: {} has no tokenizer: each byte of a text is a token. If the model was trained with one, "
                  "copy its tokenizer.json there; --tokenizer bytes says that bytes are meant",
                  printable(options.lacks_tokenizer.string())));
}

Dataset prepare_data(DataOptions options, TrainingLog& log) {
  const auto is_text = [](const std::filesystem::path& path) {
    const std::string kind = path.extension().string();
    return kind != ".npy" && kind != ".bin" && kind != ".tfd";
  };
  if (std::ranges::any_of(options.paths, is_text)) say_if_bytes_are_tokens(options, log);
  options.progress = [&log](const char* phase, std::uint64_t done, std::uint64_t total) {
    log.progress(phase, done, total);
  };
  Dataset data = Dataset::prepare(options);
  const auto summaries = data.summaries();
  for (const std::string& line : data_lines(summaries, options.sequence_length)) log.say(line);
  log.object({{"data", data_json(summaries)}});
  return data;
}

void announce_device(const RunOptions& options, const SessionOptions& settings, TrainingLog& log) {
  if (settings.device == "cuda") {
    watch_gpu(log);
  } else if (options.device == "auto") {
    const auto info = swap::cuda_device_info(0);
    if (!info.ok())
      log.say("device: CPU; no CUDA device: " + info.error().detail.substr(0, info.error().detail.find(';')));
  }
}

}  // namespace tierflow

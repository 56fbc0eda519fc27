#pragma once
// The configuration of a model's low-rank adapters (adapters.h), with the names, defaults and rules of PEFT's
// LoraConfig, and the adapter_config.json of a PEFT folder.
#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace tierflow {

// First values of adapters. standard: the product is zero. The others are of the weight beside which they stand, and y
// = W x + scale * (B(A(x)) - B0(A0(x))) with frozen first values A0 and B0: the same as adapters of a base W - scale *
// B0 A0, which need not be written. pissa: its largest singular values. olora: the first rows and columns of its QR
// decomposition. lora_ga: of the gradient of the loss with respect to the weight, its first left and right singular
// vectors, as the paper has them. peft_lora_ga: the same with the lengths that PEFT gives them. galore: no adapters in
// PEFT's sense. Of each pair one factor is a projector of the gradient (GaLore), and only the other one is trained, for
// a window of steps; then their product goes into the weight, and the next window begins. See Windows.
enum class AdapterInit : std::uint8_t { standard, pissa, olora, lora_ga, peft_lora_ga, galore };
// Whether the first values come from the gradient.
constexpr bool of_gradient(AdapterInit init) {
  return init == AdapterInit::lora_ga || init == AdapterInit::peft_lora_ga;
}

// Of AdapterInit::galore (Zhao et al., GaLore, 2024). While a projector P stands, W_t = W_0 + P S_t, where S takes the
// steps of AdamW on the projected gradient: W_0 need not be written.
struct Windows {
  std::int64_t steps = 200;  // of each
  double scale = 1;          // of the learning rate of S: GaLore's alpha

  bool operator==(const Windows&) const = default;
};

struct AdapterConfig {
  std::int64_t rank = 8;
  double alpha = 8;              // scale = alpha / rank
  bool rank_stabilised = false;  // scale = alpha / sqrt(rank) (Kalajdzievski, rsLoRA, 2023)
  double dropout = 0;            // of the adapter's input, in training
  // use_dora: the rows of W + scale * B A are brought to lengths of their own, which are trained (Liu et al., DoRA,
  // 2024). Their lengths as they are count as constants in the gradient.
  bool dora = false;
  // Modules: a name fits where the module's path is that name or ends with "." and it. None: every linear layer of the
  // blocks.
  std::vector<std::string> targets, exclude;
  // Instead of names: a regular expression (ECMAScript) for the whole path.
  std::string target_pattern, exclude_pattern;
  // target_parameters: parameters of experts (expert_parameters.h) that have adapters, named as modules are. What
  // chooses among modules (exclude, layers) says nothing of them. They have neither dropout nor a magnitude, and begin
  // as `standard`.
  std::vector<std::string> parameters;
  bool parameters_alone = false;     // no linear layer has an adapter
  std::vector<std::int64_t> layers;  // numbers of blocks; none: all
  // layers_pattern: where these numbers stand in a module's path: behind what one of these regular expressions fits
  // (a part of the path, from a "." to the next). None: wherever the model has them.
  std::vector<std::string> layer_patterns;
  // Ranks and alphas by regular expression for the path or what follows a "." in it; the first that fits counts.
  std::vector<std::pair<std::string, std::int64_t>> rank_pattern;
  std::vector<std::pair<std::string, double>> alpha_pattern;
  AdapterInit init = AdapterInit::standard;
  std::int64_t pissa_iterations = 0;  // of a randomised decomposition; 0: the whole one
  Windows windows;                    // of galore
  // modules_to_save: modules whose path ends with one of these, whatever stands before, are trained whole; they have no
  // adapters.
  std::vector<std::string> saved;
  // ensure_weight_tying: a tied embedding that is trained whole stays tied to the head.
  bool ties_saved = true;

  bool operator==(const AdapterConfig&) const = default;
};

// What `init` and what belongs to it are called: "default", "pissa", "pissa_niter_N", "olora", "lora-ga", or
// as PEFT calls its own "lora_ga".
std::string adapter_init_name(const AdapterConfig& config);
// Sets `init` and what belongs to it from such a name. Throws Exception (kind usage), which lists the names. galore has
// no name.
void set_adapter_init(AdapterConfig& config, const std::string& name);

// Throws Exception (kind usage) for ranks and scales out of range, and for options that contradict each other.
void check_adapters(const AdapterConfig& config);

// The width of the basis in which a weight [out, in], or its gradient, is decomposed for first values of this rank; 0:
// it is decomposed as a whole.
std::uint64_t basis_columns(const AdapterConfig& config, std::uint64_t rank, std::uint64_t out, std::uint64_t in);

// Reads an adapter_config.json of PEFT. Throws Exception (kind input), which names `where` and the field, if it cannot
// be read or names a variant that is not supported.
AdapterConfig parse_adapter_config(const std::string& json, const std::string& where);
// The adapter_config.json in a PEFT folder. Adapters of a changed base are refused, because that base does not exist.
AdapterConfig read_adapter_config(const std::filesystem::path& folder);
// Of a folder that holds adapters and their first values together, as adapters of twice the rank and the same scale
// beside an unchanged base (PEFT's path_initial_model_for_weight_conversion). Others stay as they are.
AdapterConfig joined_with_first(AdapterConfig config);
// The text of an adapter_config.json, with the keys that are supported. transposed: weights are [in, out].
std::string adapter_config_json(const AdapterConfig& config, bool transposed);

}  // namespace tierflow

#pragma once
// Low-rank adapters as tensors of a model: y = W x + scale * B(A(x)) for linear layers of the blocks, with W frozen, A
// [rank, in] and B [out, rank] (Hu et al., LoRA, 2021). They are trained, stored, streamed and committed as any tensor.
// Names, defaults and rules are those of PEFT's LoraConfig, so that a model reads the same adapters as there.
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "runtime/spec/model_spec.h"

namespace tierflow {

struct AdapterConfig {
  std::int64_t rank = 8;
  double alpha = 8;              // scale = alpha / rank
  bool rank_stabilised = false;  // scale = alpha / sqrt(rank) (Kalajdzievski, rsLoRA, 2023)
  double dropout = 0;            // of the adapter's input, in training
  // Modules: a name fits where the module's path is that name or ends with "." and it. None: every linear layer of the
  // blocks.
  std::vector<std::string> targets, exclude;
  // In their place: a regular expression (ECMAScript) for the whole path.
  std::string target_pattern, exclude_pattern;
  std::vector<std::int64_t> layers;  // numbers of blocks; none: all
  // By regular expression for the path or what follows a "." in it; the first that fits counts.
  std::vector<std::pair<std::string, std::int64_t>> rank_pattern;
  std::vector<std::pair<std::string, double>> alpha_pattern;

  bool operator==(const AdapterConfig&) const = default;
};

// Reads an adapter_config.json of PEFT's. Throws Exception (kind input) naming `where` and the field, for what cannot
// be read and for variants that there are none of here.
AdapterConfig parse_adapter_config(const std::string& json, const std::string& where);
// That of PEFT's folder.
AdapterConfig read_adapter_config(const std::filesystem::path& folder);

// An adapter beside each linear layer that `config` names: A uniform in +-1/sqrt(in), B zero. Everything else is
// frozen. Throws Exception (kind usage) for numbers out of range, and for a target that fits nothing, with the names
// there are.
void add_adapters(ModelSpec& spec, const AdapterConfig& config);

// Stores the weights of the linear layers of blocks in `format`; they are frozen then.
void set_base_format(ModelSpec& spec, WeightFormat format);

// The module that a tensor belongs to, as transformers names it, if the tensor is a linear layer's weight in a block;
// else empty. Of an adapter's tensor: its layer's.
std::string linear_module(const TensorSpec& tensor);

bool is_adapter(const TensorSpec& tensor);

}  // namespace tierflow

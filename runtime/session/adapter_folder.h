#pragma once
// Low-rank adapters in a folder as PEFT writes it: adapter_config.json and adapter_model.safetensors (fp32).
#include <array>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "runtime/checkpoint/safetensors.h"
#include "runtime/checkpoint/weight_source.h"
#include "runtime/spec/adapters.h"
#include "runtime/state/model_extents.h"

namespace tierflow {

struct AdapterFolder {
  AdapterConfig config;
  std::shared_ptr<const Checkpoint> weights;
};
// Throws Exception (kind input) if it cannot be read.
AdapterFolder open_adapter(const std::filesystem::path& folder);
// Throws Exception (kind input) unless `weights` are all that the folder of `spec`'s adapters has. PEFT saves the table
// of tokens and the head themselves, too, where they have adapters: these are to have the values of `base`, as bf16.
void check_adapters(const ModelSpec& spec, const Checkpoint& weights, const WeightSource& base);

// The values of a model's adapters, and of what is trained whole beside them, in such a folder. Holds all of a factor
// that is_turned_beside_base() at a time, in fp32.
class AdapterReader {
 public:
  explicit AdapterReader(std::shared_ptr<const Checkpoint> weights) : weights_(std::move(weights)) {}
  // Elements [first, first + out.size()) of a tensor of the model. Any thread may call it.
  void read(const TensorSpec& tensor, std::uint64_t first, std::span<float> out);

 private:
  const std::shared_ptr<const Checkpoint> weights_;
  std::mutex mutex_;
  struct Factor {
    std::string name;
    std::vector<float> values;  // in the order of the model
  };
  const Factor& factor(const TensorSpec& tensor, const std::string& name);
  std::array<Factor, 2> factors_;  // the last two that were asked for: an expert's tensors take turns; the newer first
};

// Calls `use` with the fp32 master of a tensor of the specification's units, in order.
using MasterOf = std::function<void(int unit, int tensor, const UseMaster& use)>;
// Session::export_adapter, from wherever the masters are. Of what is trained whole no more is in memory than MasterOf
// hands on at once; of adapters one factor, or two where the folder has them side by side (turned_factor_bytes()).
// base, base_weights: the model they are for and its CheckpointWriter::Adapter::base_weights, as far as they are known.
// Returns what Session::export_adapter() returns.
std::string write_adapter(const ModelSpec& spec, const std::filesystem::path& base, const std::string& base_weights,
                          const std::filesystem::path& folder, const MasterOf& master);

}  // namespace tierflow

#pragma once
// Which modules of a model a configuration of adapters names, by PEFT's rules. Only for use inside of spec.
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/spec/adapter_config.h"
#include "runtime/spec/model_spec.h"
#include "runtime/spec/name_pattern.h"

namespace tierflow {

// Whether the module's path is that name or ends with "." and it.
bool name_fits(std::string_view module, std::string_view name);

// A regular expression that fits only this path.
std::string exactly(const std::string& path);

// The path of a module in its text model; and last the one in the model of text and other things that it lies within,
// where it does.
std::vector<std::string> module_paths(const ModelSpec& spec, const std::string& module);

// What fits a path, or what follows a "." in it, as patterns of ranks and alphas do.
NamePattern at_the_end(const std::string& expression);

// What a configuration says of each module, by any of its paths. Both outlive this.
class AdapterChoice {
 public:
  // Throws Exception (kind usage) for an invalid regular expression.
  AdapterChoice(const ModelSpec& spec, const AdapterConfig& config);

  // Whether a module in this block is to have an adapter; layer -1: outside of blocks.
  bool wants(const std::string& module, std::int64_t layer) const;
  // Whether a parameter is, by its path. That of a linear layer is its module's path and ".weight".
  bool wants_parameter(const std::string& path) const;
  // What patterns of ranks and alphas see of a module or parameter: its path, or that of its weight if it is meant.
  std::string patterned(const std::string& path) const;
  // The rank and alpha for a path as patterns see it.
  std::int64_t rank(const std::string& module);
  double alpha(const std::string& module);

 private:
  bool is_in_layer(const std::vector<std::string>& paths, std::int64_t layer) const;
  template <class Value>
  Value first_fit(const std::string& module, const std::vector<std::pair<std::string, Value>>& patterns,
                  Value otherwise);

  const ModelSpec& spec_;
  const AdapterConfig& config_;
  const std::optional<NamePattern> target_, exclude_;
  std::map<std::string, NamePattern> at_the_end_;  // those that a module came to
};

}  // namespace tierflow

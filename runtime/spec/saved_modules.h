#pragma once
// The modules that a configuration of adapters trains whole (modules_to_save), and how modules are called in
// transformers' and PEFT's models. Only for use inside of spec.
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/spec/model_spec.h"

namespace tierflow {

constexpr std::string_view kHead = "lm_head";

// "model.layers.0.self_attn.q_proj" of its weight's and its bias's names.
std::string module_of(const std::string& tensor);

// "q_proj" of "model.layers.0.self_attn.q_proj".
std::string last_name(const std::string& module);

// A tensor's name in transformers' and PEFT's models, which folders of weights may have under another.
std::string name_in_model(const std::string& tensor);

// Replaces names of the head that only folders of weights have.
void name_head_as_in_model(std::vector<std::string>& modules);

class SavedModules {
 public:
  // Both outlive this.
  SavedModules(const ModelSpec& spec, const std::vector<std::string>& names);

  // Whether this tensor is in one of them. has_adapter: its layer is to have one, unless it is saved. Throws Exception
  // (kind usage) for experts and routers, and for a part of a name that has an adapter.
  bool wants(const TensorSpec& tensor, bool has_adapter);
  // The token table, where it is the head too.
  bool is_tied_table(const TensorSpec& tensor) const { return tied_ && tensor.name == table_; }
  // Throws Exception (kind usage) if a name fitted no tensor of those that wants() was asked about.
  void expect_used() const;

 private:
  std::vector<std::string> paths_of(const TensorSpec& tensor) const;

  const ModelSpec& spec_;
  const std::vector<std::string>& names_;
  std::set<std::string> unused_, modules_;
  bool tied_ = false;
  std::string table_;
};

}  // namespace tierflow

#include "runtime/spec/saved_modules.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "runtime/base/exception.h"
#include "runtime/base/files.h"
#include "runtime/spec/adapter_choice.h"

namespace tierflow {
namespace {

constexpr std::string_view kHeadInFolders = "embed_out";  // GPT-NeoX's; in transformers 5 the module is kHead

}  // namespace

std::string module_of(const std::string& tensor) {
  return tensor.substr(0, tensor.rfind('.'));
}

std::string last_name(const std::string& module) {
  return module.substr(module.rfind('.') + 1);
}

std::string name_in_model(const std::string& tensor) {
  return module_of(tensor) == kHeadInFolders ? fmt::format("{}.weight", kHead) : tensor;
}

void name_head_as_in_model(std::vector<std::string>& modules) {
  std::ranges::replace(modules, std::string(kHeadInFolders), std::string(kHead));
}

SavedModules::SavedModules(const ModelSpec& spec, const std::vector<std::string>& names)
    : spec_(spec), names_(names), unused_(names.begin(), names.end()), tied_(spec.config.tie_word_embeddings) {
  if (tied_) table_ = spec.units.front().tensors.front().name;
}

// The paths of its module and of those around it, in the text model and in the whole one. The first is the module's
// own.
std::vector<std::string> SavedModules::paths_of(const TensorSpec& tensor) const {
  std::vector<std::string> paths{module_of(name_in_model(tensor.name))};
  for (std::size_t dot = paths.back().rfind('.'); dot != std::string::npos; dot = paths.back().rfind('.'))
    paths.push_back(paths.back().substr(0, dot));
  if (is_tied_table(tensor)) paths.emplace_back(kHead);
  if (paths.front() != module_of(tensor.name)) paths.push_back(module_of(tensor.name));
  for (std::size_t i = 0, in_text = paths.size(); i < in_text; ++i)
    if (std::string whole = module_paths(spec_, paths[i]).back(); whole != paths[i]) paths.push_back(std::move(whole));
  return paths;
}

bool SavedModules::wants(const TensorSpec& tensor, bool has_adapter) {
  const std::vector<std::string> paths = paths_of(tensor);
  modules_.insert(last_name(paths.front()));
  std::string fitting;
  bool whole = false;
  for (const std::string& path : paths)
    for (const std::string& name : names_)
      if (path.ends_with(name)) {
        unused_.erase(name);
        fitting = name;
        whole = whole || name_fits(path, name);
      }
  if (fitting.empty()) return false;
  if (tensor.part != Part::plain)
    fail_usage(
        fmt::format("the module to save \"{}\" has a router or experts in it: these cannot be trained beside "
                    "adapters",
                    printable(fitting)));
  if (has_adapter && !whole)
    fail_usage(fmt::format("the module to save \"{}\" is a part of the name {}, which has an adapter: give whole names",
                           printable(fitting), paths.front()));
  return true;
}

void SavedModules::expect_used() const {
  if (!unused_.empty())
    fail_usage(fmt::format("no module that could be saved is called {}: this model has {}",
                           printable(fmt::format("{}", fmt::join(unused_, " or ")), 200), fmt::join(modules_, ", ")));
}

}  // namespace tierflow

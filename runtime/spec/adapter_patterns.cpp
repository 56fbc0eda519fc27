// Whether what a configuration of new adapters excludes, or gives another rank or alpha, is there.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <set>

#include "runtime/base/exception.h"
#include "runtime/base/files.h"
#include "runtime/spec/adapter_choice.h"
#include "runtime/spec/adapters.h"
#include "runtime/spec/saved_modules.h"

namespace tierflow {
namespace {

constexpr std::size_t kShown = 200;

std::string names(const std::vector<std::string>& paths) {
  std::set<std::string> last;
  for (const std::string& path : paths) last.insert(last_name(path));
  return fmt::format("{}", fmt::join(last, ", "));
}

bool any(const std::vector<std::string>& paths, const auto& fits) {
  return std::ranges::any_of(paths, fits);
}

}  // namespace

void expect_patterns_fit(const ModelSpec& spec, const AdapterConfig& config) {
  AdapterChoice choice(spec, config);
  std::vector<std::string> layers{std::string(kHead)}, adapted;  // a tied head has no tensor
  for (const UnitSpec& unit : spec.units)
    for (const TensorSpec& tensor : unit.tensors) {
      const std::string module = linear_module(tensor);
      if (module.empty()) continue;
      const AdapterPart part = adapter_part(tensor);
      if (part == AdapterPart::none) std::ranges::copy(module_paths(spec, module), std::back_inserter(layers));
      if (part == AdapterPart::a)
        std::ranges::copy(module_paths(spec, choice.patterned(module)), std::back_inserter(adapted));
    }
  const auto shown = [](const std::string& text) { return printable(text, kShown); };
  for (const std::string& name : config.exclude)
    if (!any(layers, [&](const std::string& path) { return name_fits(path, name); }))
      fail_usage(fmt::format("no linear layer to exclude is called {}: this model has {}", shown(name), names(layers)));
  if (const std::string& expression = config.exclude_pattern; !expression.empty()) {
    const NamePattern excluded(expression);
    if (!any(layers, [&](const std::string& path) { return excluded.fits(path); }))
      fail_usage(
          fmt::format("no linear layer to exclude fits {}: this model has {}", shown(expression), names(layers)));
  }
  const auto expect_adapter = [&](const char* number, const std::string& expression) {
    const NamePattern end = at_the_end(expression);
    if (!any(adapted, [&](const std::string& path) { return end.fits(path); }))
      fail_usage(fmt::format("nothing that has an adapter fits {}, for which {} is given: there are adapters of {}",
                             shown(expression), number, names(adapted)));
  };
  for (const auto& [expression, rank] : config.rank_pattern) expect_adapter("a rank", expression);
  for (const auto& [expression, alpha] : config.alpha_pattern) expect_adapter("an alpha", expression);
}

}  // namespace tierflow

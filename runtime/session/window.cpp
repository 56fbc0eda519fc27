// Training by projected gradients (GaLore, Zhao et al., 2024) in windows: while a projector stands, the weight that is
// computed with is W + B A, and W is only read. The next window begins with its sum added to W's master, with the other
// factor at zero and the projector of a new gradient. The moments go on from window to window, as GaLore's do.
#include <algorithm>

#include "runtime/session/session_impl.h"
#include "runtime/session/window_sum.h"
#include "runtime/spec/adapters.h"

namespace tierflow {

// What is committed was so before, or is so after: nothing in between can be gone on with.
void Session::Impl::begin_window(const GradientInit& found) {
  window_tried = steps;
  if (!found.finite()) return;
  const ModelSpec& spec = model->spec();
  for (int unit = 0; unit < static_cast<int>(spec.units.size()); ++unit) {
    const std::vector<TensorSpec>& tensors = spec.units[static_cast<std::size_t>(unit)].tensors;
    if (std::ranges::none_of(tensors, is_adapter)) continue;
    const WindowSum sum(spec, unit, [&](int tensor, const UseMaster& use) { state->read_master(unit, tensor, use); });
    state->rewrite(
        unit,
        [&](int tensor) {
          const TensorSpec& of = tensors[static_cast<std::size_t>(tensor)];
          return is_adapter(of) || (of.rewritten == Rewritten::master && window_begun >= 0);
        },
        [&](int tensor, std::uint64_t first, std::span<float> values) {
          const TensorSpec& of = tensors[static_cast<std::size_t>(tensor)];
          if (!is_adapter(of))
            sum.add_to(tensor, first, values);
          else if (of.trainable)
            std::ranges::fill(values, 0.0F);
          else
            found.read(of, first, values);
        });
  }
  window_begun = steps;
}

}  // namespace tierflow

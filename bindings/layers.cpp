// Layers that the program computes in the place of a model's own code. Gradients go into the sums of the turn that is
// being taken; everything here releases the interpreter's lock.
#include <torch/csrc/utils/pybind.h>

#include "bindings/convert.h"
#include "runtime/models/decoder_layer.h"

namespace py = pybind11;

namespace tierflow::bindings {
namespace {

using models::DecoderLayer;
using Released = py::call_guard<py::gil_scoped_release>;

struct Kept {
  std::unique_ptr<KeptActivations> activations;
};

// positions: int64 [batch, sequence] of packed rows, as in MicroBatch; None: each row is one document.
DecoderLayer::Input input_of(const torch::Tensor& hidden, const torch::Tensor& cos, const torch::Tensor& sin,
                             const std::optional<torch::Tensor>& positions) {
  DecoderLayer::Input input{hidden, cos, sin};
  if (positions) input.documents = MicroBatch{.ids = *positions, .labels = {}, .positions = *positions}.documents();
  return input;
}

torch::Tensor sum_at(const Gradients& sums, int position) {
  return position < 0 ? torch::Tensor() : sums.at(static_cast<std::size_t>(position));
}

}  // namespace

void register_layers(py::module_& module) {
  py::class_<Kept>(module, "Kept");
  // Of the text of a config.json.
  py::class_<ModelConfig>(module, "DecoderConfig").def(py::init([](const std::string& text) {
    return parse_model_spec(text, "the model's config", Tiling::none()).config;
  }));
  py::class_<DecoderLayer>(module, "DecoderLayer")
      .def_static("architectures", &DecoderLayer::architectures)
      // adapters: (module, rank, scale) each.
      .def(py::init([](const ModelConfig& config, std::int64_t layer, const std::vector<std::string>& roles,
                       const std::vector<std::tuple<std::string, std::int64_t, double>>& adapters, double dropout) {
        std::vector<DecoderLayer::Adapter> of;
        for (const auto& [module, rank, scale] : adapters) of.push_back({module, rank, scale});
        return DecoderLayer(config, layer, roles, of, dropout);
      }))
      .def_property_readonly("window", [](const DecoderLayer& self) { return self.form().window; })
      .def_property_readonly("rotated", [](const DecoderLayer& self) { return self.form().rotated; })
      .def_property_readonly("interleaved", [](const DecoderLayer& self) { return self.form().interleaved; })
      .def_property_readonly("rounded", [](const DecoderLayer& self) { return self.form().rounded; })
      .def_property_readonly("keeps", [](const DecoderLayer& self) { return self.form().keeps; })
      .def(
          "forward",
          [](const DecoderLayer& self, const Weights& weights, const torch::Tensor& hidden, const torch::Tensor& cos,
             const torch::Tensor& sin, const std::optional<torch::Tensor>& positions) {
            return self.forward(weights, input_of(hidden, cos, sin, positions));
          },
          Released())
      .def(
          "forward_keeping",
          [](const DecoderLayer& self, const Weights& weights, const torch::Tensor& hidden, const torch::Tensor& cos,
             const torch::Tensor& sin, const std::optional<torch::Tensor>& positions) {
            auto kept = std::make_unique<Kept>();
            torch::Tensor out = self.forward(weights, input_of(hidden, cos, sin, positions), &kept->activations);
            return std::pair(std::move(out), std::move(kept));
          },
          Released())
      // weights: those of the turn, and behind them as many of adapters as `adapters` has sums for (fp32, or None where
      // one is unwanted). kept: what forward_keeping() gave, which is used up; None: it is computed again.
      .def(
          "backward",
          [](const DecoderLayer& self, Streamer& streamer, const Weights& weights, const torch::Tensor& hidden,
             const torch::Tensor& cos, const torch::Tensor& sin, const std::optional<torch::Tensor>& positions,
             const torch::Tensor& d_out, Kept* kept, const std::vector<std::optional<torch::Tensor>>& adapters) {
            Gradients sums = streamer.sums(weights);
            for (std::size_t i = 0; i < adapters.size(); ++i)
              if (adapters[i]) sums.set(weights.size() - adapters.size() + i, *adapters[i]);
            return self.backward(weights, sums, input_of(hidden, cos, sin, positions), d_out,
                                 kept == nullptr ? nullptr : std::move(kept->activations));
          },
          Released())
      .def("kept_bytes", &DecoderLayer::kept_bytes);
  // Positions in `weights`; bias -1: none.
  module.def(
      "linear_backward",
      [](Streamer& streamer, const Weights& weights, int weight, int bias, const torch::Tensor& x,
         const torch::Tensor& d_y) {
        const Gradients sums = streamer.sums(weights);
        return models::linear_backward(weights.at(static_cast<std::size_t>(weight)), sum_at(sums, weight),
                                       sum_at(sums, bias), x, d_y);
      },
      Released());
  module.def(
      "embedding_backward",
      [](Streamer& streamer, const Weights& weights, int weight, const torch::Tensor& ids, const torch::Tensor& d,
         std::int64_t padding) { models::embedding_backward(sum_at(streamer.sums(weights), weight), ids, d, padding); },
      Released());
  module.def("cross_entropy_sum", &models::cross_entropy_sum, Released());
  module.def("cross_entropy_gradient", &models::cross_entropy_gradient, Released());
}

}  // namespace tierflow::bindings

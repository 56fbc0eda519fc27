// Prepared rows as Python sees them: Dataset and its micro-batches.
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/convert.h"
#include "runtime/batches/data_batches.h"

namespace py = pybind11;

namespace tierflow::bindings {

void register_data(py::module_& module) {
  using Released = py::call_guard<py::gil_scoped_release>;
  py::class_<Dataset>(module, "Dataset")
      .def(py::init([](const std::vector<std::string>& files, std::vector<double> weights, std::string packing,
                       std::int64_t vocab_size, std::int64_t sequence_length, double held_out, std::uint64_t seed) {
             return Dataset::prepare({.paths = {files.begin(), files.end()},
                                      .weights = std::move(weights),
                                      .packing = std::move(packing),
                                      .vocab_size = vocab_size,
                                      .sequence_length = sequence_length,
                                      .held_out = held_out,
                                      .seed = seed});
           }),
           Released())
      .def("training_sequences", &Dataset::training_sequences)
      .def("held_out_sequences", &Dataset::held_out_sequences)
      .def("fingerprint", &Dataset::fingerprint)
      // Ids, labels and, where documents do not see each other, positions: [rows, sequence_length] int64.
      .def(
          "batch",
          [](const Dataset& self, bool held_out, std::int64_t first, std::int64_t rows) {
            const MicroBatch batch =
                micro_batch(self, held_out ? Sequences::held_out : Sequences::training, first, rows);
            return std::tuple(batch.ids, batch.labels,
                              batch.positions.defined() ? std::optional(batch.positions) : std::nullopt);
          },
          Released());
}

}  // namespace tierflow::bindings

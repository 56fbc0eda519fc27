// Prepared rows as Python sees them: Dataset and its micro-batches.
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/convert.h"
#include "bindings/named.h"
#include "runtime/batches/teacher_batches.h"
#include "runtime/data/data_json.h"

namespace py = pybind11;

namespace tierflow::bindings {
namespace {

// What `options` names; everything else as DataOptions has it. progress: a function of phase, bytes done and bytes in
// all, or None.
DataOptions data_options_of(const py::dict& options, const py::object& progress) {
  DataOptions data;
  Named named(options);
  const auto take_path = [&](const char* name, std::filesystem::path& field) {
    std::string text;
    named.take(name, text);
    field = text;
  };
  for (const auto& path : options["files"].cast<std::vector<std::string>>()) data.paths.emplace_back(path);
  named.take("weights", data.weights);
  named.take("format", data.format);
  named.take("train_on", data.train_on);
  named.take("packing", data.packing);
  take_path("chat_template", data.chat_template);
  take_path("tokenizer", data.tokenizer);
  take_path("python", data.python);
  take_path("cache", data.row_cache);
  named.take("skip", data.skip_bad_records);
  bool pairs = false;
  named.take("pairs", pairs);
  if (pairs) data.pairs = Pairs::only;
  named.take("vocab_size", data.vocab_size);
  named.take("sequence_length", data.sequence_length);
  named.take("held_out", data.held_out);
  named.take("seed", data.seed);
  data.progress = [&progress](const char* phase, std::uint64_t done, std::uint64_t total) {
    const py::gil_scoped_acquire locked;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (!progress.is_none()) progress(phase, done, total);
  };
  return data;
}

}  // namespace

void register_data(py::module_& module) {
  using Released = py::call_guard<py::gil_scoped_release>;
  py::class_<Dataset>(module, "Dataset")
      .def(py::init([](const py::dict& options, const py::object& progress) {
             const DataOptions parsed = data_options_of(options, progress);
             const py::gil_scoped_release released;
             return Dataset::prepare(parsed);
           }),
           py::arg("options"), py::arg("progress") = py::none())
      .def("training_sequences", &Dataset::training_sequences)
      .def("held_out_sequences", &Dataset::held_out_sequences)
      .def("fingerprint", &Dataset::fingerprint)
      .def("summaries", [](const Dataset& self) { return data_json(self.summaries()).dump(); })
      .def("training_tokens", &Dataset::training_tokens)
      .def(
          "write_rows", [](const Dataset& self, const std::string& out) { self.write_rows(out); }, Released())
      .def("all_sequences", &Dataset::all_sequences)
      .def("numbered",
           [](const Dataset& self, std::int64_t first, std::int64_t rows) {
             const MicroBatch batch = micro_batch(self, Sequences::numbered, first, rows);
             return std::tuple(batch.ids, batch.labels,
                               batch.positions.defined() ? std::optional(batch.positions) : std::nullopt);
           })
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
  py::class_<TeacherFile>(module, "TeacherFile")
      .def(py::init([](const std::string& path, const Dataset& data, std::int64_t vocabulary) {
        auto file = std::make_unique<TeacherFile>(path);
        check_teacher(*file, data, vocabulary);
        return file;
      }))
      .def_property_readonly("top", [](const TeacherFile& self) { return self.shape().top; })
      // Ids int32 and log-probabilities fp16 [rows, sequence_length, K] of sequences of the data: 0 where none counts.
      .def(
          "batch",
          [](const TeacherFile& self, const Dataset& data, bool held_out, std::int64_t first, std::int64_t rows) {
            const Sequences which = held_out ? Sequences::held_out : Sequences::training;
            MicroBatch batch = micro_batch(data, which, first, rows);
            add_teacher(batch, self, data, which, first);
            return std::pair(batch.teacher_ids, batch.teacher_log_probabilities);
          },
          Released());
  py::class_<TeacherFileWriter>(module, "TeacherWriter")
      .def(py::init([](const std::string& path, const Dataset& data, std::int64_t top, std::int64_t vocabulary) {
             return std::make_unique<TeacherFileWriter>(path, teacher_shape(data, top, vocabulary));
           }),
           Released())
      // The next sequence by number: of the positions that count ids int32 and log-probabilities fp16 [positions, K].
      .def(
          "add",
          [](TeacherFileWriter& self, const torch::Tensor& ids, const torch::Tensor& log_probabilities) {
            const torch::Tensor of_ids = ids.to(torch::kCPU, torch::kInt).contiguous(),
                                of_log = log_probabilities.to(torch::kCPU, torch::kHalf).contiguous();
            const std::int32_t* id = of_ids.const_data_ptr<std::int32_t>();
            const auto* word = static_cast<const std::uint16_t*>(of_log.const_data_ptr());
            self.add({.ids = {id, id + of_ids.numel()}, .log_probabilities = {word, word + of_log.numel()}});
          },
          Released())
      .def(
          "finish", [](TeacherFileWriter& self) { self.finish({}); }, Released());
}

}  // namespace tierflow::bindings

// The extension module tierflow._native: Streamer and planning as Python sees them. Conversion alone; waits release the
// interpreter's lock.
#include <malloc.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings/convert.h"
#include "runtime/base/exception.h"
#include "runtime/checkpoint/safetensors.h"
#include "runtime/checkpoint/weights_hash.h"
#include "runtime/device/device_memory.h"
#include "runtime/models/attention.h"
#include "runtime/planning/export_request.h"
#include "runtime/session/session.h"
#include "runtime/spec/model_spec.h"
#include "swap/device.h"

namespace py = pybind11;

namespace tierflow::bindings {
namespace {

using Released = py::call_guard<py::gil_scoped_release>;

swap::Pass pass_of(const std::string& name) {
  for (const swap::Pass pass : {swap::Pass::forward, swap::Pass::head, swap::Pass::backward, swap::Pass::evaluate})
    if (name == swap::pass_name(pass)) return pass;
  fail_usage("no pass is named " + name);
}

// Python's signals are seen between the pieces of long work.
Progress watched() {
  return [](const char*, std::uint64_t, std::uint64_t) {
    const py::gil_scoped_acquire locked;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  };
}

std::unique_ptr<Streamer> make_streamer(const py::list& units, std::vector<std::vector<int>> stages,
                                        const py::dict& tensors, const std::string& folder,
                                        const py::dict& stored_names, const py::dict& options,
                                        const py::function& say) {
  auto specs = units_of(units);
  const StreamerOptions parsed = options_of(options);
  const TensorSource source = source_of(tensors, folder, stored_names);
  const py::gil_scoped_release released;
  return std::make_unique<Streamer>(
      std::move(specs), std::move(stages), source.weights, parsed, watched(),
      [&say](const std::string& line) {
        const py::gil_scoped_acquire locked;
        say(line);
      },
      source.stored);
}

py::dict memory_of(const Streamer& streamer) {
  const MemoryUse use = streamer.memory();
  py::dict result;
  result["device_budget"] = use.device_budget;
  result["device_used"] = use.device_peak;
  result["host_budget"] = use.host_budget;
  result["host_used"] = use.host_used;
  result["storage_bytes"] = use.storage_bytes;
  return result;
}

// {lane: {"tasks", "bytes", "busy_seconds"}}
py::dict lanes_of(const Streamer& streamer) {
  py::dict result;
  const auto counters = streamer.lanes();
  for (int lane = 0; lane < swap::kLanes; ++lane) {
    py::dict entry;
    entry["tasks"] = counters[lane].tasks;
    entry["bytes"] = counters[lane].bytes;
    entry["busy_seconds"] = counters[lane].busy_seconds;
    result[swap::lane_name(static_cast<swap::Lane>(lane))] = entry;
  }
  return result;
}

py::dict plan_of(const py::list& units, const std::vector<std::vector<int>>& stages, const py::dict& options,
                 int micro_batches) {
  const StreamerBytes bytes = streamer_bytes(units_of(units), stages, options_of(options), micro_batches);
  py::dict result;
  result["parameters"] = bytes.parameters;
  result["trainable_parameters"] = bytes.trainable_parameters;
  result["state_bytes"] = bytes.state_bytes;
  result["gradient_bytes"] = bytes.gradient_bytes;
  result["device_bytes"] = bytes.device_bytes;
  result["host_bytes"] = bytes.host_bytes;
  result["storage_bytes"] = bytes.storage_bytes;
  result["hi_resident"] = bytes.hi_resident;
  result["state_resident"] = bytes.state_resident;
  result["gradient_resident"] = bytes.gradient_resident;
  result["layer_major_read"] = bytes.layer_major_read;
  result["layer_major_write"] = bytes.layer_major_write;
  result["layer_major_link"] = bytes.layer_major_link;
  result["loop_read"] = bytes.loop_read;
  result["loop_write"] = bytes.loop_write;
  result["loop_link"] = bytes.loop_link;
  return result;
}

SavedPart part_of(const py::handle& name, const py::handle& shape) {
  return {.name = py::cast<std::string>(name), .shape = py::cast<std::vector<std::int64_t>>(shape)};
}

// By unit and tensor: [(name, shape)].
SavedParts parts_of(const py::list& units) {
  SavedParts result;
  for (const py::handle unit : units) {
    auto& tensors = result.emplace_back();
    for (const py::handle tensor : py::cast<py::list>(unit)) {
      auto& parts = tensors.emplace_back();
      for (const py::handle part : py::cast<py::list>(tensor)) {
        const auto pair = py::cast<py::tuple>(part);
        parts.push_back(part_of(pair[0], pair[1]));
      }
    }
  }
  return result;
}

// [(name, a tensor that shows shape and type, function that makes it)]
std::vector<ExtraTensor> extra_of(const py::list& tensors) {
  std::vector<ExtraTensor> result;
  for (const py::handle item : tensors) {
    const auto entry = py::cast<py::tuple>(item);
    const auto like = py::cast<torch::Tensor>(entry[1]);
    const auto make = py::cast<py::function>(entry[2]);
    result.push_back(
        {.as = part_of(entry[0], py::cast(like.sizes().vec())), .type = like.scalar_type(), .values = [make] {
           const py::gil_scoped_acquire locked;
           return py::cast<torch::Tensor>(make());
         }});
  }
  return result;
}

// Somebody who asks for the model, until they hear of it. The requests outlive it.
struct ExportAnswer {
  ExportRequests::Answer answer;
};

// may: whether the next one is heard. write: called with the folder that they ask for, and their ExportAnswer.
void answer_requests(ExportRequests& requests, std::int64_t step, const py::function& may, const py::function& write) {
  requests.answer(
      step, [&] { return may().cast<bool>(); },
      [&](const std::filesystem::path& out, const ExportRequests::Answer& answer) {
        write(out.string(), ExportAnswer{answer});
      });
}

// How a folder stores a tensor: "plain"; "fp8", "fp8-rows" or "mxfp4", which can be kept so; or "quantised" in another
// way.
const char* how_stored(const Checkpoint& checkpoint, const std::string& name, const TensorEntry& entry) {
  if (entry.packed == nullptr) return "plain";
  for (const WeightFormat format : {WeightFormat::fp8, WeightFormat::fp8_rows, WeightFormat::mxfp4})
    if (checkpoint.has(name, format)) return weight_format_name(format);
  return "quantised";
}

// {name: (shape, file, how_stored())} of a folder's safetensors.
py::dict stored_tensors(const std::string& folder) {
  py::dict result;
  const Checkpoint checkpoint = Checkpoint::open(std::filesystem::path(folder));
  for (const auto& [name, entry] : checkpoint.tensors())
    result[py::str(name)] =
        py::make_tuple(entry.shape, checkpoint.files()[entry.file].string(), how_stored(checkpoint, name, entry));
  return result;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  register_errors(module);
  module.attr("torch_version") = TIERFLOW_TORCH_VERSION;
  py::class_<TensorUpdate>(module, "TensorUpdate")
      .def(py::init([](double lr, double beta1, double beta2, double eps, double weight_decay, std::int64_t step,
                       double scale) {
             return TensorUpdate{.active = true,
                                 .lr = lr,
                                 .beta1 = beta1,
                                 .beta2 = beta2,
                                 .eps = eps,
                                 .weight_decay = weight_decay,
                                 .step = step,
                                 .scale = scale};
           }),
           py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"),
           py::arg("step"), py::arg("scale"))
      .def(py::init([] { return TensorUpdate{}; }));
  py::class_<ExportAnswer>(module, "ExportAnswer")
      .def("written", [](const ExportAnswer& self) { self.answer({}); })
      .def("failed", [](const ExportAnswer& self,
                        const std::string& why) { self.answer({.kind = io::ErrorKind::environment, .detail = why}); })
      .def("ends", [](const ExportAnswer& self) { self.answer({.kind = io::ErrorKind::cancelled}); });
  py::class_<ExportRequests>(module, "ExportRequests")
      .def(py::init([](const std::vector<std::string>& storage, const py::function& say) {
        return std::make_unique<ExportRequests>(Folders(storage.begin(), storage.end()),
                                                [&say](const std::string& line) { say(line); });
      }))
      .def("answer", &answer_requests);
  py::class_<Streamer>(module, "Streamer")
      .def(py::init(&make_streamer))
      .def("enter",
           [](Streamer& self, int stage, const std::string& pass, const std::vector<bool>& gradients, bool stay) {
             const swap::Pass parsed = pass_of(pass);
             const py::gil_scoped_release released;
             return self.enter(stage, parsed, gradients, stay);
           })
      .def("add",
           [](Streamer& self, const std::vector<std::optional<torch::Tensor>>& gradients) {
             Gradients given;
             for (const auto& gradient : gradients) given.push_back(gradient.value_or(torch::Tensor()));
             const py::gil_scoped_release released;
             self.add(given);
           })
      .def("collect", &Streamer::collect, Released())
      .def("leave", &Streamer::leave, Released())
      .def_property_readonly("inside", &Streamer::inside)
      .def("owns", [](const Streamer& self,
                      std::uintptr_t address) { return self.owns(reinterpret_cast<const void*>(address)); })
      .def("gradients_of", &Streamer::gradients_of)
      .def("touched", &Streamer::touched)
      .def("squares", &Streamer::squares, Released())
      .def("finite", &Streamer::finite, Released())
      .def("gradient", &Streamer::gradient, Released())
      .def("drop_gradient", &Streamer::drop_gradient)
      .def("forget", &Streamer::forget)
      .def("step", &Streamer::step, Released())
      .def("read", &Streamer::read, Released())
      .def("write", &Streamer::write, Released())
      .def("save",
           [](Streamer& self, const std::string& folder, const py::list& parts, const py::list& extra,
              std::uint64_t shard_bytes) {
             const SavedParts saved = parts_of(parts);
             const std::vector<ExtraTensor> others = extra_of(extra);
             const py::gil_scoped_release released;
             return self.save(folder, saved, others, shard_bytes, watched());
           })
      .def("save_state",
           [](Streamer& self, const std::string& file) {
             const py::gil_scoped_release released;
             self.save_state(file, watched());
           })
      .def("load_state",
           [](Streamer& self, const std::string& file) {
             const py::gil_scoped_release released;
             self.load_state(file, watched());
           })
      .def("commit",
           [](Streamer& self, std::int64_t step, std::string beside) {
             const StreamerCommit commit{.step = step, .beside = std::move(beside)};
             const py::gil_scoped_release released;
             self.commit(commit);
           })
      .def("begin_commit",
           [](Streamer& self, std::int64_t step, std::string beside) {
             const StreamerCommit commit{.step = step, .beside = std::move(beside)};
             const py::gil_scoped_release released;
             self.begin_commit(commit);
           })
      .def("end_commit", &Streamer::end_commit, Released())
      .def_property_readonly("exports_beside", &Streamer::exports_beside)
      // goes_on: asked between the pieces of the work; where it says no, this ends with CancelledError.
      .def("export_committed",
           [](const Streamer& self, const std::string& folder, const py::function& goes_on) {
             const py::gil_scoped_release released;
             return self.export_committed(folder, [&](const char*, std::uint64_t, std::uint64_t) {
               const py::gil_scoped_acquire locked;
               if (!goes_on().cast<bool>())
                 throw Exception({.kind = io::ErrorKind::cancelled, .operation = "export", .detail = "the run ends"});
             });
           })
      // (step, beside) of the state that is gone on with; None for a new one.
      .def_property_readonly("resumed",
                             [](const Streamer& self) -> std::optional<std::pair<std::int64_t, py::bytes>> {
                               if (!self.resumed()) return std::nullopt;
                               return std::pair(self.resumed()->step, py::bytes(self.resumed()->beside));
                             })
      .def("discard", &Streamer::discard)
      .def("memory", &memory_of)
      .def("lanes", &lanes_of)
      .def_property_readonly("departures", &Streamer::departures)
      .def("describe", &Streamer::describe);
  register_layers(module);
  register_data(module);
  register_session(module);
  module.def("plan", &plan_of);
  module.def(
      "merge",
      [](const std::string& base, const std::string& adapter, const std::string& out) {
        return merge_model(base, adapter, out, watched());
      },
      Released());
  module.def("stored_tensors", &stored_tensors);
  module.def("check_quantised", &check_quantised);
  module.def(
      "weights_hash", [](const std::string& folder) { return weights_hash(Checkpoint::open(folder)); }, Released());
  module.def("expect_model_folder", [](const std::string& folder) { expect_model_folder(folder); });
  module.def("checkpoint_aliases", [](const std::string& name) { return checkpoint_aliases(name); });
  module.def(
      "attention",
      [](const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& v) {
        return models::attention(q, k, v, {}, 0.0);
      },
      Released());
  // What malloc has given out, as it counts it, and what torch's tensors on the CPU take beside it once a Session was
  // there (device_memory.h): these tensors among it, pools of Tierflow's not.
  module.def("allocated_bytes", [] {
    const struct mallinfo2 info = mallinfo2();
    return info.uordblks + info.hblkhd + DeviceMemory::mapped_bytes();
  });
  module.def("cuda_available", &swap::cuda_available);
}

}  // namespace tierflow::bindings

#include "bindings/convert.h"

#include <cstring>
#include <map>

#include "runtime/exception.h"
#include "runtime/safetensors.h"

namespace py = pybind11;

namespace tierflow::bindings {
namespace {

struct ErrorClass {
  io::ErrorKind kind;
  const char* name;
  PyObject* also;  // the built-in exception that fits as well
};

// Options of the program, as the package spells them.
std::string in_python(std::string text) {
  static const std::pair<const char*, const char*> kSpelled[] = {
      {"a smaller --micro-batch or --sequence-length needs less", "streamed blocks that are smaller need less"},
      {"a smaller --micro-batch moves smaller activations through it", "name a storage folder"},
      {"or name a --storage folder", "or name a folder, Budget(storage=[...]),"},
      {"use --device cpu", "plan with device=\"cpu\""},
      {"--precision ", "precision "},
      {"--host-memory", "Budget(host=...) of"},
      {"--device-memory", "Budget(device=...) of"},
      {"--allow-any-filesystem", "Budget(allow_any_filesystem=True)"},
      {"--allow-buffered", "Budget(allow_any_filesystem=True)"},
      {"--storage", "Budget(storage=[...])"}};
  for (const auto& [from, to] : kSpelled)
    if (const auto at = text.find(from); at != std::string::npos) text.replace(at, std::strlen(from), to);
  return text;
}

}  // namespace

std::vector<UnitSpec> units_of(const py::list& units) {
  std::vector<UnitSpec> result;
  for (const py::handle item : units) {
    const auto unit = py::cast<py::dict>(item);
    UnitSpec spec{.name = py::cast<std::string>(unit["name"]), .trainable = py::cast<bool>(unit["trainable"])};
    for (const py::handle entry : py::cast<py::list>(unit["tensors"])) {
      const auto tensor = py::cast<py::dict>(entry);
      TensorSpec of;
      of.name = py::cast<std::string>(tensor["name"]);
      of.role = of.name;
      of.shape = py::cast<std::vector<std::int64_t>>(tensor["shape"]);
      of.moments_32 = py::cast<bool>(tensor["moments_32"]);
      spec.tensors.push_back(std::move(of));
    }
    result.push_back(std::move(spec));
  }
  return result;
}

StreamerOptions options_of(const py::dict& options) {
  StreamerOptions result;
  for (const auto& [key, value] : options) {
    const auto name = py::cast<std::string>(key);
    if (name == "device") {
      result.device = py::cast<std::string>(value);
    } else if (name == "device_memory") {
      result.device_memory = py::cast<std::uint64_t>(value);
    } else if (name == "workspace") {
      result.workspace = py::cast<std::uint64_t>(value);
    } else if (name == "host_memory") {
      result.host_memory = py::cast<std::uint64_t>(value);
    } else if (name == "storage") {
      for (const auto& folder : py::cast<std::vector<std::string>>(value)) result.storage.emplace_back(folder);
    } else if (name == "precision") {
      result.precision = parse_precision(py::cast<std::string>(value));
    } else if (name == "allow_buffered") {
      result.allow_buffered = py::cast<bool>(value);
    } else if (name == "allow_any_filesystem") {
      result.allow_any_filesystem = py::cast<bool>(value);
    } else if (name == "seed") {
      result.seed = py::cast<std::uint64_t>(value);
    } else if (name == "chunk_elements") {
      result.chunk_elements = py::cast<std::uint64_t>(value);
    } else if (name == "chaos_seed") {
      result.chaos_seed = py::cast<std::uint64_t>(value);
    } else {
      throw Exception(io::ErrorKind::usage, "unknown option " + name);
    }
  }
  return result;
}

WeightSource source_of(const py::dict& tensors, const std::string& folder, const py::dict& stored_names) {
  std::map<std::string, torch::Tensor> in_memory;
  for (const auto& [name, tensor] : tensors)
    in_memory[py::cast<std::string>(name)] = py::cast<torch::Tensor>(tensor).detach().to(torch::kCPU).contiguous();
  std::map<std::string, std::string> names;
  for (const auto& [name, stored] : stored_names) names[py::cast<std::string>(name)] = py::cast<std::string>(stored);
  const auto checkpoint =
      folder.empty() ? nullptr : std::make_shared<const Checkpoint>(Checkpoint::open(std::filesystem::path(folder)));
  return [in_memory, names, checkpoint](const TensorSpec& tensor, std::uint64_t first, std::span<float> out) {
    if (const auto found = in_memory.find(tensor.name); found != in_memory.end()) {
      const torch::NoGradGuard no_grad;
      const auto count = static_cast<std::int64_t>(out.size());
      torch::from_blob(out.data(), {count}, torch::kFloat32)
          .copy_(found->second.view({-1}).narrow(0, static_cast<std::int64_t>(first), count));
      return;
    }
    checkpoint->read_f32(names.at(tensor.name), first, out);
  };
}

void register_errors(py::module_& module) {
  static PyObject* base = nullptr;
  static std::map<io::ErrorKind, PyObject*> classes;
  const auto define = [&](const char* name, const py::tuple& bases, const char* text) {
    PyObject* made = PyErr_NewExceptionWithDoc((std::string("tierflow.") + name).c_str(), text, bases.ptr(), nullptr);
    if (made == nullptr) throw py::error_already_set();
    module.add_object(name, py::reinterpret_borrow<py::object>(made));
    return made;
  };
  const auto tuple = [](PyObject* first, PyObject* second) {
    return second == nullptr ? py::make_tuple(py::handle(first))
                             : py::make_tuple(py::handle(first), py::handle(second));
  };
  base = define("Error", tuple(PyExc_RuntimeError, nullptr),
                "What Tierflow raises: one line, what failed, where, what to do.");
  const ErrorClass kinds[] = {{io::ErrorKind::usage, "UsageError", PyExc_ValueError},
                              {io::ErrorKind::input, "InputError", PyExc_ValueError},
                              {io::ErrorKind::environment, "EnvironmentError", nullptr},
                              {io::ErrorKind::io, "StorageError", nullptr},
                              {io::ErrorKind::corruption, "CorruptionError", nullptr},
                              {io::ErrorKind::numeric, "NumericError", PyExc_ArithmeticError},
                              {io::ErrorKind::locked, "LockedError", nullptr},
                              {io::ErrorKind::memory, "OutOfMemoryError", PyExc_MemoryError},
                              {io::ErrorKind::cancelled, "CancelledError", nullptr}};
  for (const ErrorClass& kind : kinds)
    classes[kind.kind] = define(kind.name, tuple(base, kind.also), "A kind of tierflow.Error.");
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const Exception& error) {
      const auto found = classes.find(error.error().kind);
      PyErr_SetString(found == classes.end() ? base : found->second, in_python(error.what()).c_str());
    }
  });
}

}  // namespace tierflow::bindings

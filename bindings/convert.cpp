#include "bindings/convert.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>

#include "bindings/named.h"
#include "runtime/base/exception.h"
#include "runtime/checkpoint/safetensors.h"

namespace py = pybind11;

namespace tierflow::bindings {
namespace {

struct ErrorClass {
  io::ErrorKind kind;
  const char* name;
  PyObject* also;  // the built-in exception that fits as well
};

// A line of the program, as the package spells it: options by their names in Python, and this process as such.
std::string in_python(std::string text) {
  static const std::pair<const char*, const char*> kSpelled[] = {
      {"a smaller --micro-batch or --sequence-length needs less", "streamed blocks that are smaller need less"},
      {"a smaller --micro-batch moves smaller activations through it", "name a storage folder"},
      {"or name a --storage folder", "or name a folder, Budget(storage=[...]),"},
      {"; where it is silent, try --engine threads", ""},
      {"use --device cpu", "plan with device=\"cpu\""},
      {"--precision ", "precision "},
      {"--host-memory", "Budget(host=...) of"},
      {"--device-memory", "Budget(device=...) of"},
      {"--allow-any-filesystem", "allow_any_filesystem=True"},
      {"--allow-buffered", "allow_any_filesystem=True"},
      {"--storage", "Budget(storage=[...])"},
      {"--micro-batches", "micro_batches"},
      {"--micro-batch", "micro_batch"},
      {"--sequence-length", "sequence_length"},
      {"--go-back", "Budget(go_back=True)"}};
  for (const auto& [from, to] : kSpelled)
    if (const auto at = text.find(from); at != std::string::npos) text.replace(at, std::strlen(from), to);
  const std::string own = "process " + std::to_string(::getpid()) + " holds it";
  if (const auto at = text.find(own); at != std::string::npos)
    text.replace(at, own.size(),
                 "this process holds it: first give it back with tierflow.close(model), or close() of its Session");
  return text;
}

// A tensor of the checkpoint within one that several make up; end: of its elements there.
struct StoredPart {
  std::string name;
  std::uint64_t end = 0;
};

std::vector<std::byte> read_unconverted(const Checkpoint& checkpoint, const std::string& name,
                                        const std::vector<std::int64_t>& shape, WeightFormat format) {
  TensorSpec spec;
  spec.name = name;
  spec.shape = shape;
  spec.format = format;
  return checkpoint.read_unconverted(spec);
}

// Matrices in FP8 that follow one another in one tensor: so do their codes, and their scales.
std::vector<std::byte> read_matrices(const Checkpoint& checkpoint, const std::vector<StoredPart>& parts,
                                     const TensorSpec& tensor) {
  const WeightLayout whole = weight_layout(tensor.format, tensor.shape);
  std::vector<std::byte> stored(whole.bytes);
  std::uint64_t codes = 0, scales = whole.scales;
  for (const StoredPart& part : parts) {
    const std::vector<std::int64_t>& shape = checkpoint.find(part.name)->shape;
    const WeightLayout at = weight_layout(tensor.format, shape);
    const std::uint64_t of_scales = at.bytes - at.scales;
    if (codes + at.elements > whole.elements || scales + of_scales > whole.bytes)
      fail(io::ErrorKind::internal, tensor.name, "consists of matrices that do not fit it");
    const std::vector<std::byte> piece = read_unconverted(checkpoint, part.name, shape, tensor.format);
    std::memcpy(stored.data() + codes, piece.data(), at.elements);
    std::memcpy(stored.data() + scales, piece.data() + at.scales, of_scales);
    codes += at.elements;
    scales += of_scales;
  }
  return stored;
}

// Tensors that Python makes, each when it is first asked for. The two made last are kept, more where they are small:
// neighbours are asked for in turns.
class MadeTensors {
 public:
  void add(std::string name, py::function make) { makers_.emplace(std::move(name), std::move(make)); }

  torch::Tensor get(const std::string& name) {
    const std::lock_guard lock(mutex_);
    for (const auto& [held, values] : held_)
      if (held == name) return values;
    torch::Tensor values;
    {
      const py::gil_scoped_acquire locked;
      values = py::cast<torch::Tensor>(makers_.at(name)()).detach().to(torch::kCPU).contiguous();
    }
    held_.emplace_back(name, values);
    std::size_t bytes = 0;
    for (const auto& [held, of] : held_) bytes += of.nbytes();
    for (; held_.size() > 2 && bytes > kHeldBytes; held_.pop_front()) bytes -= held_.front().second.nbytes();
    return values;
  }

 private:
  static constexpr std::size_t kHeldBytes = 64 << 20;

  std::map<std::string, py::function> makers_;
  std::mutex mutex_;
  std::deque<std::pair<std::string, torch::Tensor>> held_;
};

}  // namespace

std::vector<UnitSpec> units_of(const py::list& units) {
  std::vector<UnitSpec> result;
  for (const py::handle item : units) {
    const auto unit = py::cast<py::dict>(item);
    UnitSpec spec{.name = py::cast<std::string>(unit["name"])};
    const bool trainable = py::cast<bool>(unit["trainable"]);
    for (const py::handle entry : py::cast<py::list>(unit["tensors"])) {
      const auto tensor = py::cast<py::dict>(entry);
      TensorSpec of;
      of.name = py::cast<std::string>(tensor["name"]);
      of.role = of.name;
      of.shape = py::cast<std::vector<std::int64_t>>(tensor["shape"]);
      of.trainable = trainable;
      of.moments_32 = py::cast<bool>(tensor["moments_32"]);
      of.format = parse_weight_format(py::cast<std::string>(tensor["format"]));
      spec.tensors.push_back(std::move(of));
    }
    result.push_back(std::move(spec));
  }
  return result;
}

StreamerOptions options_of(const py::dict& options) {
  StreamerOptions result;
  Named named(options);
  std::vector<std::string> storage;
  std::string precision = precision_name(result.precision);
  named.take("device", result.device);
  named.take("device_memory", result.device_memory);
  named.take("workspace_share", result.workspace_share);
  named.take("host_memory", result.host_memory);
  named.take("storage", storage);
  named.take("precision", precision);
  named.take("allow_buffered", result.allow_buffered);
  named.take("allow_any_filesystem", result.allow_any_filesystem);
  named.take("seed", result.seed);
  named.take("chunk_elements", result.chunk_elements);
  named.take("durable", result.durable);
  named.take("go_back", result.go_back);
  named.take("run", result.run);
  named.take("chaos_seed", result.chaos_seed);
  named.expect_no_more();
  result.storage.assign(storage.begin(), storage.end());
  result.precision = parse_precision(precision);
  return result;
}

TensorSource source_of(const py::dict& tensors, const std::string& folder, const py::dict& stored_names) {
  auto made = std::make_shared<MadeTensors>();
  std::map<std::string, torch::Tensor> in_memory;
  for (const auto& [key, value] : tensors) {
    const auto name = py::cast<std::string>(key);
    if (py::isinstance<py::function>(value)) {
      made->add(name, py::reinterpret_borrow<py::function>(value));
    } else {
      in_memory[name] = py::cast<torch::Tensor>(value).detach().to(torch::kCPU).contiguous();
    }
  }
  const auto checkpoint =
      folder.empty() ? nullptr : std::make_shared<const Checkpoint>(Checkpoint::open(std::filesystem::path(folder)));
  const auto stored = std::make_shared<std::map<std::string, std::vector<StoredPart>>>();
  for (const auto& [key, value] : stored_names) {
    std::vector<StoredPart>& parts = (*stored)[py::cast<std::string>(key)];
    std::uint64_t end = 0;
    for (const auto& name : py::cast<std::vector<std::string>>(value)) {
      end += static_cast<std::uint64_t>(c10::multiply_integers(checkpoint->find(name)->shape));
      parts.push_back({.name = name, .end = end});
    }
  }
  TensorSource source;
  source.weights = [in_memory, stored, checkpoint, made](const TensorSpec& tensor, std::uint64_t first,
                                                         std::span<float> out) {
    if (const auto found = stored->find(tensor.name); found != stored->end()) {
      auto part = std::upper_bound(found->second.begin(), found->second.end(), first,
                                   [](std::uint64_t at, const StoredPart& candidate) { return at < candidate.end; });
      for (std::uint64_t begin = part == found->second.begin() ? 0 : (part - 1)->end; !out.empty(); ++part) {
        const auto count = std::min<std::uint64_t>(out.size(), part->end - first);
        checkpoint->read_f32(part->name, first - begin, out.first(count));
        out = out.subspan(count);
        first = begin = part->end;
      }
      return;
    }
    const auto found = in_memory.find(tensor.name);
    const torch::Tensor values = found != in_memory.end() ? found->second : made->get(tensor.name);
    const torch::NoGradGuard no_grad;
    const auto count = static_cast<std::int64_t>(out.size());
    torch::from_blob(out.data(), {count}, torch::kFloat32)
        .copy_(values.view({-1}).narrow(0, static_cast<std::int64_t>(first), count));
  };
  source.stored = {.has =
                       [stored, checkpoint](const std::string& name, WeightFormat format) {
                         const auto found = stored->find(name);
                         if (found == stored->end()) return false;
                         if (found->second.size() > 1 && format == WeightFormat::mxfp4) return false;
                         return std::ranges::all_of(
                             found->second, [&](const StoredPart& part) { return checkpoint->has(part.name, format); });
                       },
                   .read =
                       [stored, checkpoint](const TensorSpec& tensor) {
                         const std::vector<StoredPart>& parts = stored->at(tensor.name);
                         return parts.size() == 1
                                    ? read_unconverted(*checkpoint, parts[0].name, tensor.shape, tensor.format)
                                    : read_matrices(*checkpoint, parts, tensor);
                       }};
  return source;
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

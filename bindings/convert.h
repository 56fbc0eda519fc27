#pragma once
// Python dictionaries to the runtime's options, and its errors to Python exceptions.
#include <torch/csrc/utils/pybind.h>

#include <vector>

#include "runtime/stream/streamer.h"

namespace tierflow::bindings {

// {"name", "trainable", "tensors": [{"name", "shape", "moments_32", "format"}]}
std::vector<UnitSpec> units_of(const pybind11::list& units);
StreamerOptions options_of(const pybind11::dict& options);
// Where weights come from, by tensor name. tensors: in memory, or functions that make them when they are asked for
// (those made last are kept). stored_names: tensors of a checkpoint folder that follow one another in it; several that
// are to be kept in FP8 are matrices, in tiles with rows in multiples of 128.
struct TensorSource {
  WeightSource weights;
  StoredSource stored;
};
TensorSource source_of(const pybind11::dict& tensors, const std::string& folder, const pybind11::dict& stored_names);

// Defines tierflow.Error and a class for each kind; from then on C++ exceptions arrive as these.
void register_errors(pybind11::module_& module);
// Defines what fused layers compute with (layers.cpp).
void register_layers(pybind11::module_& module);
// Defines Dataset: prepared rows; TeacherFile and TeacherWriter (data.cpp).
void register_data(pybind11::module_& module);
// Defines Session (session.cpp).
void register_session(pybind11::module_& module);

}  // namespace tierflow::bindings

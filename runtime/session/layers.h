#pragma once
// A model of your own torch::nn::Modules. Each layer maps (carry, shared) to a carry. Repeated layers share one
// template module, whose parameters are bound to the weights of one layer after the other. So the layers are never all
// constructed at once.
#include <torch/nn/module.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "runtime/models/layered_model.h"
#include "runtime/session/linear.h"
#include "runtime/session/session.h"

namespace tierflow {

// A layer: register parameters and submodules as usual and implement forward(). It computes in bf16 on weights that
// exist only during the call: keep no tensor that shares storage or a graph with a parameter. A parameter for which
// requires_grad_(false) was called is frozen. Buffers keep their types; forward() must not change them. forward() runs
// again in the backward and must draw the same random numbers: it draws them from torch's default generator, which the
// session seeds for each call and afterwards puts back. Other threads must not draw from that generator while a session
// trains such layers (give a data loader a generator of its own). The first layer gets an
// empty carry and reads shared.ids. The last layer returns {loss}: a scalar, the loss summed over the labels that
// count. With packed rows, a layer with attention must keep to shared.documents, and a layer with positions must use
// shared.positions. A linear layer that is to have an adapter (with_adapters()) must be a tierflow::Linear.
class Layer : public torch::nn::Module {
 public:
  virtual Carry forward(const Carry& carry, const Shared& shared) = 0;
};

using LayerFactory = std::function<std::shared_ptr<Layer>()>;

class Layers {
 public:
  // One layer. Its initial weights are those that the factory's module has.
  Layers& add(std::string name, const LayerFactory& factory);
  // `count` layers of one shape, named "<name>.0" and so on. Buffers must be equal in all of them (rotary tables,
  // masks). Throws Exception (kind usage) if count is less than 1.
  Layers& repeat(int count, const std::string& name, const LayerFactory& factory);

  // The model for a session. Factories run again while weights are loaded, one layer at a time, which takes as much of
  // the host budget as the largest layer in fp32; torch's default generator then begins at seed + index of the layer,
  // and is put back. Throws Exception (kind usage) for a name that is empty or that two layers have, for a parameter
  // that is not floating-point or that a layer has twice, and where layers of a repeat() differ.
  Model build(std::uint64_t seed = 0) const;
  // The same with weights from a folder of safetensors, such as Session::export_hf() writes. Each parameter's tensor is
  // called "<layer>.<parameter>". Throws Exception (kind input) if one is missing or has another shape, or if the
  // folder has a tensor that no layer has.
  Model load(const std::filesystem::path& folder) const;

 private:
  struct Entry {
    std::string name;
    LayerFactory factory;
    int shape = 0;  // entries with the same number share a template
  };
  std::vector<Entry> entries_;
  int shapes_ = 0;
};

}  // namespace tierflow

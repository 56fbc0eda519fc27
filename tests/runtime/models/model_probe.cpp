// Runs a model folder once on given tokens and writes what came out, for the tests that compare with transformers:
//   model_probe MODEL TOKENS BATCH LENGTH bf16|f32 OUT [ELEMENTS]
// TOKENS: int64 ids [BATCH, LENGTH], then labels likewise, raw. OUT receives losses.f64 (raw, of each token), logits
// and gradients as safetensors of scale 1/(labels that count), fp32. With ELEMENTS the vocabulary comes in tiles of at
// most as many, blocks in halves, and OUT receives the gradients alone.
#include <torch/utils.h>

#include <filesystem>
#include <fstream>
#include <iostream>

#include "runtime/checkpoint/safetensors.h"
#include "runtime/models/causal_model.h"
#include "tests/runtime/models/run.h"

namespace tierflow::testing {
namespace {

torch::Tensor read_ids(std::istream& in, std::int64_t rows, std::int64_t length) {
  torch::Tensor ids = torch::empty({rows, length}, torch::kLong);
  in.read(static_cast<char*>(ids.data_ptr()), static_cast<std::streamsize>(ids.nbytes()));
  if (!in) throw std::runtime_error("too few tokens");
  return ids;
}

void load(ResidentModel& m, const std::filesystem::path& folder) {
  const Checkpoint checkpoint = Checkpoint::open(folder);
  for (std::size_t u = 0; u < m.units.size(); ++u) {
    for (std::size_t t = 0; t < m.units[u].size(); ++t) {
      torch::Tensor value = torch::empty(m.units[u][t].sizes(), torch::kFloat);
      checkpoint.read_f32(m.spec().units[u].tensors[t], 0,
                          {value.mutable_data_ptr<float>(), static_cast<std::size_t>(value.numel())});
      m.units[u][t].copy_(value);
    }
  }
}

void write_tensors(const std::filesystem::path& folder,
                   const std::vector<std::pair<std::string, torch::Tensor>>& tensors) {
  std::vector<TensorHeader> headers;
  for (const auto& [name, tensor] : tensors)
    headers.push_back({.name = name, .dtype = Dtype::f32, .shape = tensor.sizes().vec()});
  CheckpointWriter writer(folder, headers);
  for (const auto& [name, tensor] : tensors) {
    const torch::Tensor value = tensor.to(torch::kFloat).contiguous();
    writer.write({static_cast<const std::byte*>(value.const_data_ptr()), value.nbytes()});
  }
  writer.finish();
}

int run(int count, char** arguments) {
  const std::filesystem::path folder = arguments[1], out = arguments[6];
  const auto type = std::string(arguments[5]) == "bf16" ? torch::kBFloat16 : torch::kFloat;
  const bool tiled = count > 7;
  const Tiling tiling = tiled ? Tiling{.vocabulary_elements = std::stoll(arguments[7]), .block_elements = 1} : Tiling{};
  ResidentModel m(read_model_spec(folder / "config.json", tiling), type);
  load(m, folder);
  std::ifstream tokens(arguments[2], std::ios::binary);
  const std::int64_t rows = std::stoll(arguments[3]), length = std::stoll(arguments[4]);
  MicroBatch batch{.ids = read_ids(tokens, rows, length), .labels = {}};
  batch.labels = read_ids(tokens, rows, length);

  const double scale = 1.0 / static_cast<double>(batch.target_tokens());
  const double loss = m.forward_backward(batch, scale, /*training=*/true);
  std::vector<std::pair<std::string, torch::Tensor>> tensors;
  for (std::size_t u = 0; u < m.gradients.size(); ++u) {
    for (std::size_t t = 0; t < m.gradients[u].size(); ++t) {
      const TensorSpec& tensor = m.spec().units[u].tensors[t];
      if (!tensor.trainable) continue;
      if (tensor.first_row == 0) {
        tensors.emplace_back(tensor.name, m.gradients[u][t]);
        continue;
      }
      for (auto& [name, whole] : tensors)
        if (name == tensor.name) whole = torch::cat({whole, m.gradients[u][t]});
    }
  }
  std::cout.precision(17);
  std::cout << loss * scale + m.aux_loss() << "\n";
  std::filesystem::create_directories(out);
  if (tiled) {
    write_tensors(out, tensors);
    return 0;
  }
  const Shared shared = m.model->share(batch, torch::kCPU);
  const torch::Tensor hidden = m.forward(shared, false).back()[0];
  const models::LossHead& head = dynamic_cast<const models::CausalModel&>(*m.model).head();
  const Weights weights = m.bind(m.stages() - 1, m.units);
  const torch::Tensor losses = head.scores(weights, hidden, batch.labels).losses;
  tensors.emplace_back("logits", head.logits(weights, hidden.flatten(0, 1)));
  write_tensors(out, tensors);
  std::ofstream(out / "losses.f64", std::ios::binary)
      .write(static_cast<const char*>(losses.const_data_ptr()), static_cast<std::streamsize>(losses.nbytes()));
  return 0;
}

}  // namespace
}  // namespace tierflow::testing

int main(int count, char** arguments) {
  if (count != 7 && count != 8) {
    std::cerr << "usage: model_probe MODEL TOKENS BATCH LENGTH bf16|f32 OUT [ELEMENTS]\n";
    return 2;
  }
  try {
    return tierflow::testing::run(count, arguments);
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}

#pragma once
// Sessions of small models, everything in memory or streamed from a folder of the test's own.
#include <unistd.h>

#include <filesystem>
#include <memory>

#include "runtime/base/exception.h"
#include "runtime/checkpoint/init.h"
#include "runtime/session/session.h"
#include "tests/runtime/models/fixture.h"

namespace tierflow::testing {

inline constexpr std::uint64_t kMiB = 1 << 20;

struct Folder {
  Folder() : path(std::filesystem::current_path() / ("session-test-" + std::to_string(::getpid()))) {
    std::filesystem::remove_all(path);
  }
  ~Folder() { std::filesystem::remove_all(path); }
  std::filesystem::path path;
};

inline std::vector<MicroBatch> batches(int count, int step) {
  std::vector<MicroBatch> all;
  for (int i = 0; i < count; ++i) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(100 * step + i);
    const auto tokens = torch::randint(96, {2, 17}, generator, torch::kLong);
    all.push_back({.ids = tokens.narrow(1, 0, 16).contiguous(), .labels = tokens.narrow(1, 1, 16).contiguous()});
  }
  return all;
}

inline SessionOptions resident(int micro_batches) {
  return {.device_memory = 64 * kMiB,
          .host_memory = 64 * kMiB,
          .micro_batch = 2,
          .micro_batches = micro_batches,
          .sequence_length = 16,
          .seed = 3};
}

inline SessionOptions streamed(SessionOptions options, const Folder& folder) {
  options.storage = {folder.path};
  options.allow_buffered = options.allow_any_filesystem = true;
  options.host_memory = 150 * 1024;
  options.device_memory = 5 * kMiB + 512 * 1024;
  return options;
}

// Null where the budgets are too small.
inline std::unique_ptr<Session> opened(const Model& model, const SessionOptions& options) {
  try {
    return std::make_unique<Session>(model, options);
  } catch (const Exception& error) {
    if (error.error().kind != io::ErrorKind::usage) throw;
    return nullptr;
  }
}

inline std::vector<std::vector<float>> masters_of(Session& session) {
  std::vector<std::vector<float>> all;
  const ModelSpec& spec = session.model().spec();
  for (std::size_t unit = 0; unit < spec.units.size(); ++unit)
    for (std::size_t tensor = 0; tensor < spec.units[unit].tensors.size(); ++tensor)
      all.push_back(session.master(static_cast<int>(unit), static_cast<int>(tensor)));
  return all;
}

inline WeightSource initial(std::uint64_t seed) {
  return [seed](const TensorSpec& tensor, std::uint64_t first, std::span<float> out) {
    initial_values(tensor, seed, first, out);
    if (tensor.init == Init::normal)
      for (float& value : out) value *= 8;  // larger than usual: small models then learn within a few steps
  };
}

inline Model plain_model(const Case& which, const Tiling& tiling = {}) {
  return {make_model(parse_model_spec(which.json, which.name, tiling)), initial(11)};
}

// Another model's every call; `called` runs after each that computes.
class ForwardingModel : public LayeredModel {
 public:
  explicit ForwardingModel(std::unique_ptr<LayeredModel> model) : model_(std::move(model)) {}
  const ModelSpec& spec() const override { return model_->spec(); }
  std::uint64_t constant_bytes() const override { return model_->constant_bytes(); }
  models::Draws draws() const override { return model_->draws(); }
  bool can_keep(int stage) const override { return model_->can_keep(stage); }
  Shared share(const MicroBatch& batch, torch::Device device) const override {
    return after(model_->share(batch, device));
  }
  Carry forward(int stage, const Weights& weights, const Carry& carry, const Shared& shared,
                bool training) const override {
    return after(model_->forward(stage, weights, carry, shared, training));
  }
  Carry backward(int stage, const Weights& weights, const Gradients& gradients, const Carry& carry,
                 const Shared& shared, const Carry& d_out) const override {
    return after(model_->backward(stage, weights, gradients, carry, shared, d_out));
  }
  std::unique_ptr<KeptActivations> forward_keeping(int stage, const Weights& weights, Carry& carry,
                                                   const Shared& shared) const override {
    return after(model_->forward_keeping(stage, weights, carry, shared));
  }
  Carry backward_kept(int stage, const Weights& weights, const Gradients& gradients, const Carry& carry,
                      const Shared& shared, const Carry& d_out, std::unique_ptr<KeptActivations> kept) const override {
    return after(model_->backward_kept(stage, weights, gradients, carry, shared, d_out, std::move(kept)));
  }
  std::unique_ptr<KeptActivations> restore(int stage, const Weights& weights, const Carry& carry, const Shared& shared,
                                           std::vector<torch::Tensor> essentials) const override {
    return after(model_->restore(stage, weights, carry, shared, std::move(essentials)));
  }
  HeadScores head_scores(const Weights& weights, const Carry& carry, const Shared& shared) const override {
    return after(model_->head_scores(weights, carry, shared));
  }
  HeadResult head_loss_and_backward(const Weights& weights, const Gradients& gradients, const Carry& carry,
                                    const Shared& shared, const models::TokenScale& scale) const override {
    return after(model_->head_loss_and_backward(weights, gradients, carry, shared, scale));
  }

 private:
  virtual void called() const {}
  template <class Result>
  Result after(Result result) const {
    called();
    return result;
  }

  const std::unique_ptr<LayeredModel> model_;
};

// As little device memory as works: nothing is kept there that can be computed again.
inline SessionOptions least_device(SessionOptions options, const Model& model) {
  options.device_memory = 1;
  try {
    const Session refused(model, options);
  } catch (const Exception& error) {
    const std::string said = "the smallest that works is ", text = error.what();
    options.device_memory = std::stoull(text.substr(text.find(said) + said.size())) * 1024;
  }
  return options;
}

inline SessionOptions least_device(const SessionOptions& options, const Case& which, const Tiling& tiling) {
  return least_device(options, plain_model(which, tiling));
}

inline bool can_keep(const Case& which, const Tiling& tiling) {
  const auto model = make_model(parse_model_spec(which.json, which.name, tiling));
  for (std::size_t stage = 0; stage < model->spec().stages.size(); ++stage)
    if (model->can_keep(static_cast<int>(stage))) return true;
  return false;
}

inline std::string described(const Case& which, const SessionOptions& options, const Tiling& tiling) {
  return Session(plain_model(which, tiling), options).describe();
}

// So little device memory that activations are swapped: of two micro-batches to the host, of the others to storage.
inline SessionOptions swapping(SessionOptions options, const Case& which, const Tiling& tiling) {
  options = least_device(options, which, tiling);
  options.swap_to_host = 2;
  options.swap_to_storage = options.storage.empty() ? 0 : 100;
  while (described(which, options, tiling).find("swap theirs") == std::string::npos) {
    options.device_memory += 8 * 1024;
    if (options.device_memory > std::uint64_t{64} << 20) throw std::logic_error("nothing is swapped");
  }
  return options;
}

}  // namespace tierflow::testing

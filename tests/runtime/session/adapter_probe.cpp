// Run by tests/python/test_adapters.py and others: adapter_probe MODEL OUT STEPS [OPTION=VALUE...] trains adapters of
// rank 4 over the model in a folder, on tokens that the test can make as well, and writes them as PEFT's folder. Prints
// the loss of each step, and that of the tokens of step 0 at the end. Options: from (a folder of adapters to begin
// with), init (their first values), dora, galore (a number of steps: projected gradients in such windows, of scale 0.5,
// in place of adapters; OUT is the whole model), projectors (a file that gets those of each window), saved (a module,
// several times), pattern (an expression for the modules), parameter (of experts, several times), alone (no linear
// layers), rank_of and alpha_of (EXPRESSION:NUMBER, several times), rslora, loraplus (the ratio of learning rates),
// base (the format of the frozen weights), lr (1e-2 unless given), gradients (a folder that gets, as the adapters'
// folder, the gradients in fp32 of the mean loss of the tokens of step 0, of the adapters as they were written), logits
// (a file that gets the logits of the tokens of step 0, fp32 [rows, length, vocab]: the session's at the end, and those
// of the written folder computed in fp32).
#include <torch/utils.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>

#include "runtime/base/exception.h"
#include "runtime/models/causal_model.h"
#include "runtime/models/key_value_cache.h"
#include "runtime/session/adapter_folder.h"
#include "runtime/session/session.h"
#include "tests/runtime/models/run.h"

namespace {

constexpr std::int64_t kRows = 4, kLength = 32;

tierflow::MicroBatch batch(std::int64_t step, std::int64_t vocab) {
  const auto rows = torch::arange(kRows).unsqueeze(1), columns = torch::arange(kLength + 1).unsqueeze(0);
  const auto tokens = torch::remainder(rows * 31 + columns * columns * 7 + step % 5 * 13, vocab).to(torch::kLong);
  return {.ids = tokens.narrow(1, 0, kLength).contiguous(), .labels = tokens.narrow(1, 1, kLength).contiguous()};
}

struct Wanted {
  tierflow::AdapterConfig config{.rank = 4, .alpha = 8};
  std::string from, logits, projectors, gradients, base = "bf16";
  double lr = 1e-2, loraplus = 1;
};

Wanted wanted(int argc, char** argv) {
  Wanted all;
  for (int i = 4; i < argc; ++i) {
    const std::string word = argv[i], value = word.substr(word.find('=') + 1);
    if (word == "dora")
      all.config.dora = true;
    else if (word.starts_with("galore="))
      all.config = {.rank = 4, .init = tierflow::AdapterInit::galore, .windows = {std::stoll(value), 0.5}};
    else if (word.starts_with("projectors="))
      all.projectors = value;
    else if (word.starts_with("from="))
      all.from = value;
    else if (word.starts_with("logits="))
      all.logits = value;
    else if (word.starts_with("init="))
      tierflow::set_adapter_init(all.config, value);
    else if (word.starts_with("pattern="))
      all.config.target_pattern = value;
    else if (word.starts_with("rank_of="))
      all.config.rank_pattern.emplace_back(value.substr(0, value.rfind(':')),
                                           std::stoll(value.substr(value.rfind(':') + 1)));
    else if (word.starts_with("alpha_of="))
      all.config.alpha_pattern.emplace_back(value.substr(0, value.rfind(':')),
                                            std::stod(value.substr(value.rfind(':') + 1)));
    else if (word.starts_with("loraplus="))
      all.loraplus = std::stod(value);
    else if (word.starts_with("base="))
      all.base = value;
    else if (word.starts_with("lr="))
      all.lr = std::stod(value);
    else if (word == "rslora")
      all.config.rank_stabilised = true;
    else if (word.starts_with("parameter="))
      all.config.parameters.push_back(value);
    else if (word == "alone")
      all.config.parameters_alone = true;
    else if (word.starts_with("gradients="))
      all.gradients = value;
    else if (word.starts_with("saved="))
      all.config.saved.push_back(value);
    else
      throw tierflow::Exception(tierflow::io::ErrorKind::usage, "unknown option " + word);
  }
  return all;
}

// As a session generates: each row token by token, behind what is cached of it.
torch::Tensor logits_of(tierflow::Session& session, const torch::Tensor& ids) {
  tierflow::KeyValueCache cache(session.model().spec(), std::vector<std::int64_t>(kRows, kLength));
  std::vector<torch::Tensor> positions;
  for (std::int64_t at = 0; at < kLength; ++at) {
    tierflow::CachedRow row{.ids = ids.select(1, at).unsqueeze(0).contiguous(), .cache = &cache, .context = kLength};
    for (std::int64_t i = 0; i < kRows; ++i)
      row.spans.push_back({.sequence = i, .begin = i, .length = 1, .before = at});
    positions.push_back(session.next_logits({row}).at(0));
  }
  return torch::stack(positions, 1);
}

// Of a window: a line for each layer, then the values of each, fp32, in the same order.
void add_projectors(tierflow::Session& session, const std::string& file) {
  std::ofstream names(file + ".names", std::ios::app), out(file, std::ios::binary | std::ios::app);
  const auto& units = session.model().spec().units;
  for (std::size_t unit = 0; unit < units.size(); ++unit)
    for (std::size_t i = 0; i < units[unit].tensors.size(); ++i) {
      const tierflow::TensorSpec& tensor = units[unit].tensors[i];
      if (!tierflow::is_adapter(tensor) || tensor.trainable) continue;
      const std::vector<float> values = session.master(static_cast<int>(unit), static_cast<int>(i));
      names << tierflow::linear_module(tensor) << '\n';
      out.write(reinterpret_cast<const char*>(values.data()),
                static_cast<std::streamsize>(values.size() * sizeof(float)));
    }
}

tierflow::testing::ResidentModel in_fp32(const tierflow::Model& model) {
  tierflow::testing::ResidentModel m(model.spec(), torch::kFloat);
  for (std::size_t unit = 0; unit < m.units.size(); ++unit)
    for (std::size_t i = 0; i < m.units[unit].size(); ++i) {
      torch::Tensor& value = m.units[unit][i];
      model.weights(model.spec().units[unit].tensors[i], 0,
                    {value.data_ptr<float>(), static_cast<std::size_t>(value.numel())});
    }
  return m;
}

torch::Tensor logits_in_fp32(const tierflow::Model& model, const torch::Tensor& ids) {
  const torch::NoGradGuard no_grad;
  const tierflow::testing::ResidentModel m = in_fp32(model);
  const torch::Tensor hidden = m.forward(m.model->share({.ids = ids, .labels = ids}, torch::kCPU), false).back()[0];
  const auto& head = dynamic_cast<const tierflow::models::CausalModel&>(*m.model).head();
  return head.logits(m.bind(m.stages() - 1, m.units), hidden.flatten(0, 1)).contiguous();
}

void write_gradients(const tierflow::Model& model, const tierflow::MicroBatch& tokens, const std::string& folder) {
  tierflow::testing::ResidentModel m = in_fp32(model);
  m.forward_backward(tokens, 1.0 / static_cast<double>(tokens.target_tokens()));
  tierflow::write_adapter(model.spec(), {}, "", folder, [&](int unit, int tensor, const tierflow::UseMaster& use) {
    const torch::Tensor& gradient = m.gradients[static_cast<std::size_t>(unit)][static_cast<std::size_t>(tensor)];
    use({gradient.data_ptr<float>(), static_cast<std::size_t>(gradient.numel())});
  });
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  try {
    const Wanted adapters = wanted(argc, argv);
    tierflow::SessionOptions options;
    options.device_memory = options.host_memory = std::uint64_t{256} << 20;
    options.micro_batch = kRows;
    options.sequence_length = kLength;
    options.clip.reset();
    options.precision = tierflow::Precision::fp32_master_adam32;
    const tierflow::Model base =
        tierflow::with_base_format(tierflow::load(argv[1]), tierflow::parse_weight_format(adapters.base));
    const std::int64_t vocab = base.spec().config.vocab_size;
    const tierflow::Model adapted = adapters.from.empty() ? tierflow::with_adapters(base, adapters.config, 3)
                                                          : tierflow::with_adapters(base, adapters.from);
    tierflow::Session session(tierflow::with_learning_rates(adapted, {{"lora_B", adapters.loraplus}}), options, {});
    const auto begin = [&](int step) {
      if (!session.waits_for_gradient()) return;
      session.begin_with_gradient({batch(step, vocab)});
      if (!adapters.projectors.empty()) add_projectors(session, adapters.projectors);
    };
    begin(0);
    for (int step = 0; step < std::atoi(argv[3]); ++step) {
      begin(step);
      std::printf("%.9g\n", session.step({batch(step, vocab)}, adapters.lr).loss);
    }
    std::printf("%.9g\n", session.evaluate({batch(0, vocab)}).loss);
    if (adapters.config.init == tierflow::AdapterInit::galore)
      session.export_hf(argv[2]);
    else
      session.export_adapter(argv[2]);
    if (!adapters.gradients.empty())
      write_gradients(tierflow::with_adapters(base, argv[2]), batch(0, vocab), adapters.gradients);
    if (!adapters.logits.empty()) {
      const torch::Tensor ids = batch(0, vocab).ids;
      std::ofstream out(adapters.logits, std::ios::binary);
      for (const torch::Tensor& logits :
           {logits_of(session, ids), logits_in_fp32(tierflow::with_adapters(base, argv[2]), ids)})
        out.write(static_cast<const char*>(logits.const_data_ptr()), static_cast<std::streamsize>(logits.nbytes()));
    }
    return 0;
  } catch (const tierflow::Exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return static_cast<int>(error.error().kind);
  }
}

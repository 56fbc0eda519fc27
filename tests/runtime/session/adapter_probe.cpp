// Run by tests/python/test_adapters.py: adapter_probe MODEL OUT STEPS [OPTION=VALUE...] trains adapters of rank 4 over
// the model in a folder, on tokens that the test can make as well, and writes them as PEFT's folder. Prints the loss of
// each step, and that of the tokens of step 0 at the end. Options: from (a folder of adapters to begin with), init
// (their first values), dora, saved (a module, several times).
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "runtime/base/exception.h"
#include "runtime/session/session.h"

namespace {

constexpr std::int64_t kRows = 4, kLength = 32;

tierflow::MicroBatch batch(std::int64_t step, std::int64_t vocab) {
  const auto rows = torch::arange(kRows).unsqueeze(1), columns = torch::arange(kLength + 1).unsqueeze(0);
  const auto tokens = torch::remainder(rows * 31 + columns * columns * 7 + step % 5 * 13, vocab).to(torch::kLong);
  return {.ids = tokens.narrow(1, 0, kLength).contiguous(), .labels = tokens.narrow(1, 1, kLength).contiguous()};
}

struct Wanted {
  tierflow::AdapterConfig config{.rank = 4, .alpha = 8};
  std::string from;
};

Wanted wanted(int argc, char** argv) {
  Wanted all;
  for (int i = 4; i < argc; ++i) {
    const std::string word = argv[i], value = word.substr(word.find('=') + 1);
    if (word == "dora")
      all.config.dora = true;
    else if (word.starts_with("from="))
      all.from = value;
    else if (word.starts_with("init="))
      tierflow::set_adapter_init(all.config, value);
    else if (word.starts_with("saved="))
      all.config.saved.push_back(value);
    else
      throw tierflow::Exception(tierflow::io::ErrorKind::usage, "unknown option " + word);
  }
  return all;
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
    const tierflow::Model base = tierflow::load(argv[1]);
    const std::int64_t vocab = base.spec().config.vocab_size;
    tierflow::Session session(adapters.from.empty() ? tierflow::with_adapters(base, adapters.config, 3)
                                                    : tierflow::with_adapters(base, adapters.from),
                              options, {});
    if (session.waits_for_gradient()) session.begin_with_gradient({batch(0, vocab)});
    for (int step = 0; step < std::atoi(argv[3]); ++step)
      std::printf("%.9g\n", session.step({batch(step, vocab)}, 1e-2).loss);
    std::printf("%.9g\n", session.evaluate({batch(0, vocab)}).loss);
    session.export_adapter(argv[2]);
    return 0;
  } catch (const tierflow::Exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return static_cast<int>(error.error().kind);
  }
}

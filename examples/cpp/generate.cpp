// Continues a text, given as its tokens, with a Hugging Face model whose weights stream from a storage folder:
//     generate STORAGE MODEL TOKEN...
// Prints each token as it comes. Text and tokens are a tokenizer's to exchange; `tierflow generate` has one.
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "runtime/tierflow.h"

using namespace tierflow::literals;

int main(int argc, char** argv) try {
  if (argc < 4) {
    std::fprintf(stderr, "usage: generate STORAGE MODEL TOKEN...\n");
    return 2;
  }
  std::vector<std::vector<std::int64_t>> prompts(1);
  for (int i = 3; i < argc; ++i) prompts.front().push_back(std::stoll(argv[i]));
  const tierflow::GenerationConfig config = tierflow::read_generation_config(argv[2]);
  const tierflow::GenerationOptions options{
      .sampling = config.sampling, .stop_tokens = config.stop_tokens, .max_new_tokens = 16};
  // Of a mixture only the experts that its routers choose are fetched; other models stay as they are.
  const tierflow::Model model = tierflow::with_experts_on_demand(tierflow::load(argv[2]));
  const auto shape = tierflow::GenerationShape::of(model.spec(), prompts, options, /*most_at_once=*/1,
                                                   /*most_tokens=*/512);
  tierflow::Session session(model, {.device_memory = 32_MiB,
                                    .host_memory = 1_MiB,
                                    .storage = {argv[1]},
                                    .allow_buffered = true,  // so that the example runs on any file system; leave both
                                    .allow_any_filesystem = true,  // out on a real drive
                                    .micro_batch = 1,
                                    .micro_batches = static_cast<int>(shape.batch),
                                    .sequence_length = shape.tokens,
                                    .train = false,
                                    .cache = shape.cache,  // keys and values: in RAM, or on storage too
                                    .workspace = shape.workspace});
  tierflow::generate(session, prompts, options, {.on_token = [](std::size_t, std::int64_t token) {
                       std::printf("%lld\n", static_cast<long long>(token));
                       std::fflush(stdout);
                     }});
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}

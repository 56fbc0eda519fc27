// What writing a model takes beside its budgets.
#include <gtest/gtest.h>

#include <fstream>
#include <functional>

#include "runtime/device/device_memory.h"
#include "tests/runtime/session/fixture.h"
#include "tests/support/counted_heap.h"

namespace tierflow::testing {
namespace {

constexpr const char* kWideVocabulary =
    R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 131072, "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": false, "hidden_act": "silu"})";

// Bytes that `work` takes at most, of the heap and of torch's memory.
std::int64_t most_of(const std::function<void()>& work) {
  DeviceMemory& torch_memory = DeviceMemory::install();
  torch_memory.release_kept();
  torch_memory.reset_peak();
  reset_heap_peak();
  const std::int64_t heap = heap_used();
  const auto tensors = static_cast<std::int64_t>(torch_memory.stats().used);
  work();
  return heap_peak() - heap + static_cast<std::int64_t>(torch_memory.stats().peak_used) - tensors;
}

// Tables that are trained whole are written as they come, whoever writes them.
TEST(SessionOfAdapters, WritesLargeTablesPieceByPiece) {
  const Folder folder;
  std::filesystem::create_directories(folder.path);
  std::ofstream(folder.path / "config.json") << kWideVocabulary;
  init_checkpoint(folder.path / "config.json", folder.path / "base", 1);
  SessionOptions options = resident(1);
  options.host_memory = 256 * kMiB;
  options.device_memory = 128 * kMiB;
  Session session(
      with_adapters(load(folder.path / "base"), {.rank = 2, .alpha = 2, .saved = {"embed_tokens", "lm_head"}}, 5),
      options);
  constexpr std::int64_t kTable = std::int64_t{4} * 131072 * 32;
  EXPECT_LT(most_of([&] { session.export_adapter(folder.path / "adapter"); }), kTable / 8);
  EXPECT_LT(most_of([&] { session.export_merged(folder.path / "base", folder.path / "merged"); }), kTable * 5 / 8);
  EXPECT_LT(most_of([&] { merge_adapter(folder.path / "base", folder.path / "adapter", folder.path / "whole"); }),
            kTable * 5 / 8);
}

}  // namespace
}  // namespace tierflow::testing

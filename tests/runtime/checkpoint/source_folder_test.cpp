#include "runtime/checkpoint/source_folder.h"

#include <gtest/gtest.h>

#include <cstring>

#include "runtime/base/strict_json.h"
#include "support/temp_dir.h"
#include "tests/runtime/expect.h"

namespace tierflow {
namespace {

constexpr const char* kConfig = R"({"architectures": ["Mistral3ForConditionalGeneration"], "vision_config": {"x": 1},
  "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
  "text_config": {"model_type": "llama", "vocab_size": 8, "hidden_size": 4, "intermediate_size": 8,
                  "num_hidden_layers": 1, "num_attention_heads": 2, "tie_word_embeddings": true}})";

// A folder of text and images whose tower has a weight in FP8, of 1 times `scale`, and three whole numbers.
std::shared_ptr<const Checkpoint> make_folder(const std::filesystem::path& folder, const ModelSpec& spec, float scale) {
  std::vector<TensorHeader> headers;
  std::vector<std::byte> bytes;
  for (const UnitSpec& unit : spec.units)
    for (const TensorSpec& tensor : unit.tensors) {
      headers.push_back({.name = "language_model." + tensor.name, .shape = tensor.shape});
      bytes.resize(bytes.size() + 2 * static_cast<std::size_t>(tensor.elements()));
    }
  headers.push_back(
      {.name = "vision_tower.w", .shape = {128, 128}, .stored_dtype = "F8_E4M3", .stored_bytes = 128 * 128});
  bytes.resize(bytes.size() + 128 * 128, std::byte{0x38});
  headers.push_back({.name = "vision_tower.w_scale_inv", .dtype = Dtype::f32, .shape = {1, 1}});
  bytes.resize(bytes.size() + sizeof scale);
  std::memcpy(bytes.data() + bytes.size() - sizeof scale, &scale, sizeof scale);
  headers.push_back({.name = "vision_tower.ids", .shape = {3}, .stored_dtype = "I32", .stored_bytes = 12});
  bytes.resize(bytes.size() + 12, std::byte{7});
  CheckpointWriter writer(folder, headers);
  writer.write(bytes);
  writer.finish(kConfig);
  return std::make_shared<const Checkpoint>(Checkpoint::open(folder));
}

TEST(SourceFolder, GivesWhatIsQuantisedAsBf16AndTheRestAsItIs) {
  const testing::TempDir dir;
  const ModelSpec spec = parse_model_spec(kConfig, "config.json");
  const auto checkpoint = make_folder(dir.path() / "model", spec, 2);
  EXPECT_NO_THROW(check_tensors(spec, *checkpoint));
  const SourceFolder source(spec, checkpoint);
  EXPECT_TRUE(source.gives());
  EXPECT_EQ(source.name_of(spec.units[0].tensors[0]), "language_model.model.embed_tokens.weight");
  const Json config = parse_json(source.config_json(), "config.json");
  EXPECT_FALSE(config.contains("quantization_config"));
  EXPECT_EQ(config["vision_config"]["x"], 1);
  EXPECT_EQ(source.bytes(), 2u * 128 * 128 + 12);
  {
    CheckpointWriter writer(dir.path() / "result", source.headers());
    source.write(writer, source.hash());
    writer.finish(source.config_json());
  }
  const Checkpoint result = Checkpoint::open(dir.path() / "result");
  EXPECT_EQ(result.tensors().size(), 1u);  // of the types that are read
  ASSERT_NE(result.find("vision_tower.w"), nullptr);
  EXPECT_EQ(result.find("vision_tower.w")->dtype, Dtype::bf16);
  std::vector<float> values(128 * 128);
  result.read_f32(std::string_view("vision_tower.w"), 0, values);
  EXPECT_EQ(values, std::vector<float>(128 * 128, 2.0F));
}

TEST(SourceFolder, IsTheOneThatTheHashIsOf) {
  const testing::TempDir dir;
  const ModelSpec spec = parse_model_spec(kConfig, "config.json");
  const SourceFolder one(spec, make_folder(dir.path() / "one", spec, 2)),
      same(spec, make_folder(dir.path() / "same", spec, 2)), other(spec, make_folder(dir.path() / "other", spec, 3));
  EXPECT_EQ(one.hash(), same.hash());
  EXPECT_NE(one.hash(), other.hash());
  CheckpointWriter writer(dir.path() / "result", other.headers());
  testing::expect_refusal(io::ErrorKind::input, {"not those that the run began with"},
                          [&] { other.write(writer, one.hash()); });
  CheckpointWriter back(dir.path() / "back", one.headers());  // whichever hash is the larger
  testing::expect_refusal(io::ErrorKind::input, {"not those that the run began with"},
                          [&] { one.write(back, other.hash()); });
}

// A mask that older versions of transformers saved in GPT-NeoX, where its head may be called lm_head too.
TEST(SourceFolder, MasksOfAttentionAreNoParametersOfGptNeoxAlone) {
  const testing::TempDir dir;
  for (const char* type : {"gpt_neox", "llama"}) {
    const ModelSpec spec = parse_model_spec(
        std::string(R"({"vocab_size": 8, "hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 1, "rotary_pct": 0.5, "model_type": ")") +
            type + "\"}",
        "config.json");
    std::vector<TensorHeader> headers;
    std::vector<std::byte> bytes;
    for (const UnitSpec& unit : spec.units)
      for (const TensorSpec& tensor : unit.tensors) {
        headers.push_back(
            {.name = tensor.name == "embed_out.weight" ? "lm_head.weight" : tensor.name, .shape = tensor.shape});
        bytes.resize(bytes.size() + 2 * static_cast<std::size_t>(tensor.elements()));
      }
    headers.push_back({.name = spec.config.names.prefix + "layers.0.attention.bias", .shape = {1}});
    bytes.resize(bytes.size() + 2);
    CheckpointWriter writer(dir.path() / type, headers);
    writer.write(bytes);
    writer.finish("{}");
    const Checkpoint checkpoint = Checkpoint::open(dir.path() / type);
    const auto check = [&] { check_tensors(spec, checkpoint); };
    if (spec.config.model_type == "llama") {
      testing::expect_refusal(io::ErrorKind::input, {"layers.0.attention.bias is not a parameter"}, check);
    } else {
      EXPECT_NO_THROW(check());
    }
  }
}

// Of a mixture, as GLM-4.5 has them. Elsewhere a layer too many is a mistake.
TEST(SourceFolder, TakesLayersBehindTheLastOneFromMixturesAlone) {
  const testing::TempDir dir;
  int tried = 0;
  const auto folder = [&](const ModelSpec& spec, const std::string& extra) {
    std::vector<TensorHeader> headers;
    std::vector<std::byte> bytes;
    for (const UnitSpec& unit : spec.units)
      for (const TensorSpec& tensor : unit.tensors) {
        headers.push_back({.name = tensor.name, .shape = tensor.shape});
        bytes.resize(bytes.size() + 2 * static_cast<std::size_t>(tensor.elements()));
      }
    headers.push_back({.name = extra, .shape = {3}});
    bytes.resize(bytes.size() + 6);
    const auto path = dir.path() / std::to_string(tried++);
    CheckpointWriter writer(path, headers);
    writer.write(bytes);
    writer.finish("{}");
    return std::make_shared<const Checkpoint>(Checkpoint::open(path));
  };
  const auto model = [](const char* more) {
    return parse_model_spec(std::string(R"({"vocab_size": 8, "hidden_size": 4, "intermediate_size": 8,
        "num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 16, )") +
                                more + "}",
                            "config.json");
  };
  const ModelSpec mixture =
      model(R"("architectures": ["MixtralForCausalLM"], "num_local_experts": 2, "num_experts_per_tok": 1)");
  for (const char* behind : {"model.layers.2.eh_proj.weight", "model.layers.12345.x"}) {
    const auto checkpoint = folder(mixture, behind);
    EXPECT_NO_THROW(check_tensors(mixture, *checkpoint)) << behind;
    const auto headers = SourceFolder(mixture, checkpoint).headers();
    ASSERT_EQ(headers.size(), 1U) << behind;
    EXPECT_EQ(headers[0].name, behind);
  }
  const auto refused = [&](const ModelSpec& spec, const std::string& extra) {
    const auto checkpoint = folder(spec, extra);
    testing::expect_refusal(io::ErrorKind::input, {extra, "is not a parameter"},
                            [&] { check_tensors(spec, *checkpoint); });
  };
  for (const char* other : {"model.layers.1.eh_proj.weight", "model.layers.2x.weight", "model.layers..weight",
                            "model.layers.123456.x", "layers.2.eh_proj.weight"})
    refused(mixture, other);
  refused(model(R"("model_type": "llama")"), "model.layers.2.eh_proj.weight");
}

}  // namespace
}  // namespace tierflow

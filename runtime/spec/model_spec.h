#pragma once
// FRONT DOOR of spec. What a model consists of, read from an HF config.json: its hyper-parameters, its tensors by HF
// name and shape, and how they are grouped into the units that stream and the stages that compute. No torch here:
// planning and checking start at once.
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace tierflow {

enum class Family : std::uint8_t { llama, gpt2, opt };  // llama: Llama 2/3, Mistral, Qwen2, Qwen3
enum class Activation : std::uint8_t { silu, gelu, gelu_tanh, relu };

// Rotary embedding as in transformers' rope utilities: "default", "linear", "llama3".
struct RopeSpec {
  double theta = 10000.0;
  std::string type = "default";
  double factor = 1.0;
  double low_freq_factor = 1.0, high_freq_factor = 4.0;  // llama3
  std::int64_t original_max_positions = 0;               // llama3
};

struct ModelConfig {
  Family family = Family::llama;
  std::string architecture;  // "LlamaForCausalLM", ...: kept for the exported config.json
  std::string model_type;    // "llama", "mistral", "qwen2", "qwen3", "gpt2", "opt"
  std::int64_t vocab_size = 0, hidden_size = 0, intermediate_size = 0, layers = 0;
  std::int64_t heads = 0, kv_heads = 0, head_dim = 0;
  std::int64_t max_positions = 0;
  std::int64_t sliding_window = 0;  // 0: full attention
  double norm_eps = 1e-6;
  double initializer_range = 0.02;
  Activation activation = Activation::silu;
  RopeSpec rope;
  bool tie_word_embeddings = false;
  bool qkv_bias = false;     // bias of q, k, v projections (Qwen2; Llama's attention_bias)
  bool output_bias = false;  // bias of the attention output projection
  bool mlp_bias = false;
  bool qk_norm = false;  // RMS norm of each head's q and k (Qwen3)
  double embedding_dropout = 0, residual_dropout = 0, attention_dropout = 0;
  // OPT: learned positions start at this index; norms may come after the sublayers, and then there is no final norm.
  std::int64_t position_offset = 0;
  bool norm_before = true;
};

enum class Init : std::uint8_t { zeros, ones, normal };

// Above which size a layer is cut, so that it does not dictate the device budget. Shapes decide, never a budget: every
// run of a model has the same units and stages, and so the same bits.
struct Tiling {
  // An embedding or head with more elements becomes tiles of consecutive vocabulary rows. A tile has at most so many
  // elements, and at least one row.
  std::int64_t vocabulary_elements = std::int64_t{1} << 27;
  // A block with more becomes two stages with a unit each: attention and MLP.
  std::int64_t block_elements = std::int64_t{1} << 29;

  static constexpr Tiling none() { return {.vocabulary_elements = INT64_MAX, .block_elements = INT64_MAX}; }
};

// A tensor of the checkpoint, or consecutive rows of one.
struct TensorSpec {
  std::string name;                 // as in the checkpoint, e.g. "model.layers.3.self_attn.q_proj.weight"
  std::string role;                 // the same within its block, e.g. "self_attn.q_proj.weight": equal for every block
  std::vector<std::int64_t> shape;  // as in the checkpoint, but for the rows of a tile
  std::int64_t first_row = 0;       // of the checkpoint's tensor
  std::int64_t all_rows = 0;        // of the checkpoint's tensor; 0: the tensor is whole
  Init init = Init::normal;
  double init_std = 0.02;
  bool decays = true;       // weight decay applies: neither a norm nor a bias, as in HF Trainer
  bool moments_32 = false;  // moments kept in fp32 under 8-bit policies: embeddings, norms and biases
  bool trainable = true;    // false: kept as bf16 alone, never updated
  std::int64_t elements() const;
  std::int64_t first_element() const;  // of the checkpoint's tensor
  std::vector<std::int64_t> checkpoint_shape() const;
};

// Parameters that are stored, streamed and updated together.
struct UnitSpec {
  std::string name;  // "embedding", "layers.0", ..., "head"; with tiles "embedding.0", "layers.0.mlp", "head.norm"
  std::vector<TensorSpec> tensors;
  std::int64_t parameters() const;
};

// block: attention and MLP in one. norm: the final norm, apart from the head where that is tiled. head_tile: the tiles
// of a head but the last, which is the head.
enum class StageKind : std::uint8_t { embedding, block, attention, mlp, norm, head_tile, head };

// One step of the forward pass. Its own unit comes first; a tied head also names the embedding's unit, last. Stages
// without a unit of their own: a tied head without a final norm (OPT with norm_before false), or that norm's stage.
struct StageSpec {
  StageKind kind = StageKind::block;
  std::int64_t block = -1;             // index of the block, -1 for the others
  std::vector<int> units;              // indices into ModelSpec::units
  std::int64_t first_row = 0;          // of the vocabulary, in its tile
  bool backward_needs_input = true;    // the backward takes the stage's input; if false, it is not saved
  bool backward_needs_weights = true;  // the backward takes the weights
};

struct ModelSpec {
  ModelConfig config;
  std::string config_json;  // the config.json text this came from
  std::vector<UnitSpec> units;
  std::vector<StageSpec> stages;  // embedding, blocks in order, head
  Tiling tiling;
  std::int64_t parameters() const;
};

// Reads and checks a config.json. Throws Exception (kind input) naming the file, the field and the supported
// architectures.
ModelSpec read_model_spec(const std::filesystem::path& config_json, const Tiling& tiling = {});
ModelSpec parse_model_spec(const std::string& config_json, const std::string& where, const Tiling& tiling = {});

}  // namespace tierflow

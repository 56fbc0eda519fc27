#pragma once
// FRONT DOOR of spec. What a model consists of, read from an HF config.json: its hyper-parameters, its tensors by HF
// name and shape, and how they are grouped into the units that stream and the stages that compute. No torch here, so
// that planning and checking start at once.
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "runtime/spec/decoder_spec.h"
#include "runtime/spec/weight_format.h"

namespace tierflow {

// The hyper-parameters: those of Llama, then fields and names for what differs in other families (decoder_spec.h).
struct ModelConfig {
  std::string architecture;  // "LlamaForCausalLM", ...: kept for the exported config.json
  std::string model_type;    // "llama", "mistral", "qwen2", ...
  std::int64_t vocab_size = 0, hidden_size = 0, intermediate_size = 0, layers = 0;
  std::int64_t heads = 0, kv_heads = 0, head_dim = 0;
  std::int64_t max_positions = 0;  // max_position_embeddings; 0: nobody knows
  // max_positions, or more if a rotary embedding is stretched; 0: nobody knows.
  std::int64_t longest_sequence() const;
  double norm_eps = 1e-6;
  double initializer_range = 0.02;
  double residual_range = 0;  // initializer_range of the matrices that add to the residual; 0: the same as the others
  Activation activation = Activation::silu;
  bool tie_word_embeddings = false;
  bool qkv_bias = false;     // bias of q, k, v projections (Qwen2; Llama's attention_bias)
  bool output_bias = false;  // bias of the attention output projection
  bool mlp_bias = false;
  double embedding_dropout = 0, residual_dropout = 0, attention_dropout = 0;
  double adapter_dropout = 0;  // of the adapters' input (adapters.h)

  DecoderNames names;
  NormKind norm = NormKind::rms;
  QkNorm qk_norm = QkNorm::none;
  bool norm_of_sum = false;  // the norm after a half takes the sum with the residual; else it takes what the half adds
  bool transposed = false;   // linear layers of blocks are stored as [in, out]
  bool gated = true;         // activation(gate) * up; else activation(up)
  bool parallel = false;  // attention and MLP take the block's input, each by its norm or both by one; both are added
  bool qkv_by_head = false;  // rows of names.qkv: q, k and v of the first head, then of the next; else all of q first
  bool up_first = false;     // rows of names.gate_up: up's come before gate's
  std::vector<RopeSpec> ropes = {{}};
  std::vector<LayerSpec> layer_specs;                // of each layer; empty: all are plain
  double attention_scale = 0;                        // of scores; 0: head_dim^-0.5
  double attention_softcap = 0, logits_softcap = 0;  // softcap * tanh(x / softcap) of scores, of logits; 0: none
  QueryScaling query_scaling;
  double embedding_multiplier = 1, logits_multiplier = 1;
  double residual_multiplier = 1;    // of what each half adds
  double normed_residual = 0;        // c: a half adds to c times the norm of its input; 0: it adds to its input
  std::int64_t position_offset = 0;  // of learned positions: the first row that a token has
  ExpertsSpec experts;
  LayerSpec layer(std::int64_t index) const {
    return layer_specs.empty() ? LayerSpec{} : layer_specs.at(static_cast<std::size_t>(index));
  }
};

enum class Init : std::uint8_t { zeros, ones, normal, uniform };

// The sizes above which a layer is cut, so that it does not dictate the device budget. Shapes decide, never a budget:
// every run of a model has the same units and stages, and so the same bits.
struct Tiling {
  // An embedding or head with more elements becomes tiles of consecutive vocabulary rows. A tile has at most this many
  // elements, but at least one row.
  std::int64_t vocabulary_elements = std::int64_t{1} << 27;
  // A block with more elements becomes two stages with a unit each: attention and MLP. An MLP of experts with more
  // elements becomes several stages, each of some experts.
  std::int64_t block_elements = std::int64_t{1} << 29;
  std::int64_t experts = 0;  // the experts of such a stage; 0: as many as block_elements allows
  // A block with experts is two stages however small it is, so that a step takes several micro-batches through its
  // experts at once (StageSpec::together).
  bool experts_apart = true;

  static constexpr Tiling none() {
    return {.vocabulary_elements = INT64_MAX, .block_elements = INT64_MAX, .experts_apart = false};
  }
};

// Which part of a layer a tensor belongs to. expert: only some tokens use it.
enum class Part : std::uint8_t { plain, router, expert };

// Whether a tensor that no step updates is written between steps. words: its bf16 words are. master: its words and its
// fp32 master are, if the precision has a master.
enum class Rewritten : std::uint8_t { never, words, master };

// A tensor of the checkpoint, or consecutive rows of one: where it has three dimensions, consecutive matrices.
struct TensorSpec {
  std::string name;                 // as in the checkpoint, e.g. "model.layers.3.self_attn.q_proj.weight"
  std::string role;                 // the name within its block, e.g. "self_attn.q_proj.weight": equal in every block
  std::vector<std::int64_t> shape;  // as in the checkpoint, but for the rows of a tile
  std::int64_t first_row = 0;       // of the checkpoint's tensor
  std::int64_t all_rows = 0;        // of the checkpoint's tensor; 0: the tensor is whole
  Part part = Part::plain;
  Init init = Init::normal;
  double init_std = 0.02;   // standard deviation
  double scale = 1.0;       // scale of an adapter's product; set for its second factor
  bool decays = true;       // weight decay applies: the tensor is neither a norm nor a bias, as in HF Trainer
  bool moments_32 = false;  // moments kept in fp32 under 8-bit policies: embeddings, norms and biases
  double lr_scale = 1.0;    // multiplies the learning rate
  bool trainable = true;    // false: it has no optimizer state, and no step updates it
  Rewritten rewritten = Rewritten::never;
  WeightFormat format = WeightFormat::bf16;  // only a frozen tensor may have another one
  std::int64_t elements() const;
  // 16-bit words that its weights take; formats other than bf16 are packed into words.
  std::uint64_t words() const;
  std::int64_t first_element() const;  // of the checkpoint's tensor
  std::vector<std::int64_t> checkpoint_shape() const;
};

// Parameters that are stored, streamed and updated together.
struct UnitSpec {
  std::string name;  // "embedding", "layers.0", ..., "head"; with tiles "embedding.0", "layers.0.mlp", "head.norm"
  std::vector<TensorSpec> tensors;
  std::int64_t parameters() const;
};

// block: attention and MLP in one stage. experts: some experts of an MLP; the first such stage of a block begins with
// the MLP's norm and chooses experts for each token, the last one adds the sum to the residual. norm: the final norm, a
// stage of its own if the head is tiled. head_tile: each tile of a head but the last one, which is the stage `head`.
enum class StageKind : std::uint8_t { embedding, block, attention, mlp, experts, norm, head_tile, head };

// One step of the forward pass. Its own unit comes first; a tied head also names the embedding's unit, last. A tied
// head without a final norm (OPT with norms of sums), or the stage of that norm, has no unit of its own.
struct StageSpec {
  StageKind kind = StageKind::block;
  std::int64_t block = -1;  // index of the block, -1 for the others
  std::vector<int> units;   // indices into ModelSpec::units
  // With experts on demand (experts_on_demand.h): the units of its experts, one expert in each.
  std::vector<int> on_demand;
  std::int64_t first_row = 0;          // a tile: its first row in the vocabulary
  std::int64_t first_expert = 0;       // a stage of experts: its first expert
  std::int64_t experts = 0;            // a stage of experts: how many it has
  bool together = false;               // a step computes it for several micro-batches at once, with their rows joined
  bool backward_needs_input = true;    // the backward takes the stage's input; if false, the input is not saved
  std::vector<int> backward_parts;     // indices of the input's tensors that the backward takes; empty: all
  bool backward_needs_weights = true;  // the backward takes the weights
};

struct ModelSpec {
  ModelConfig config;
  std::string config_json;          // the text of its config.json; for a wrapped text model, only the text model's part
  std::string read_as;              // the family that --as named for an unknown architecture; empty: none
  std::string wrapper;              // the class that wraps this text model in its folder; empty: none
  std::string wrapper_config_json;  // the config.json of that class, without what says how weights are quantised
  std::string adapter_config_json;  // of its adapters, as PEFT writes it; empty: there are none
  std::string trainable_json;       // what is trained (trainable.h); empty: everything that is not frozen otherwise
  WeightFormat base_format = WeightFormat::bf16;  // of the linear layers in blocks (set_base_format)
  std::vector<std::string> base_plain;            // names of tensors among them that stay in bf16
  std::vector<UnitSpec> units;
  std::vector<StageSpec> stages;  // embedding, blocks in order, head
  Tiling tiling;
  std::uint64_t source_bytes = 0;  // the most host memory that the source of its first weights takes while they load
  std::int64_t parameters() const;
};

// Throws Exception (kind input) naming `where`, unless weights with this quantization_config, JSON, can be read
// (checkpoint/packed_weight.h).
void check_quantised(const std::string& quantization_config, const std::string& where);

// Throws Exception (kind input) that says what is missing, and for what may be a name on the Hugging Face Hub, how to
// fetch it.
void expect_model_folder(const std::filesystem::path& folder);

// Reads and checks a config.json. Throws Exception (kind input) naming the file, the field and the supported
// architectures. as: the model_type of the family that a model of an unknown architecture is read as (families.h).
ModelSpec read_model_spec(const std::filesystem::path& config_json, const Tiling& tiling = {},
                          const std::string& as = "");
// The same for the config.json in a model's folder, opened by open_beneath().
ModelSpec read_folder_spec(const std::filesystem::path& folder, const Tiling& tiling = {}, const std::string& as = "");
ModelSpec parse_model_spec(const std::string& config_json, const std::string& where, const Tiling& tiling = {},
                           const std::string& as = "");

}  // namespace tierflow

#include "runtime/spec/model_units.h"

#include <algorithm>
#include <utility>

namespace tierflow {
namespace {

void make_tile(TensorSpec& tensor, std::int64_t first, std::int64_t all) {
  if (tensor.shape.front() == all) return;
  tensor.first_row = first;
  tensor.all_rows = all;
}

// Collects the tensors of one unit in the order of the model's code; take() puts matrices before norms and biases.
class UnitBuilder {
 public:
  UnitBuilder(std::string name, std::string prefix, const ModelConfig& config)
      : unit_{.name = std::move(name)},
        prefix_(std::move(prefix)),
        std_(config.initializer_range),
        transposed_(config.transposed) {}

  void matrix(const std::string& role, std::int64_t rows, std::int64_t columns) {
    unit_.tensors.push_back(
        {.name = prefix_ + role, .role = role, .shape = {rows, columns}, .part = part_, .init_std = std_});
  }
  // Consecutive ones of `all` matrices in one tensor.
  void stack(const std::string& role, std::int64_t first, std::int64_t count, std::int64_t all, std::int64_t rows,
             std::int64_t columns) {
    matrix(role, rows, columns);
    TensorSpec& tensor = unit_.tensors.back();
    tensor.shape.insert(tensor.shape.begin(), count);
    make_tile(tensor, first, all);
  }
  // Of biases likewise.
  void stack_biases(const std::string& role, std::int64_t first, std::int64_t count, std::int64_t all,
                    std::int64_t size) {
    bias(role, size);
    TensorSpec& tensor = unit_.tensors.back();
    tensor.part = part_;
    tensor.shape.insert(tensor.shape.begin(), count);
    make_tile(tensor, first, all);
  }
  // Not trained, exact.
  void fixed(const std::string& role, std::int64_t size) {
    vector(role, size, Init::zeros);
    unit_.tensors.back().trainable = false;
    unit_.tensors.back().format = WeightFormat::fp32;
  }
  // The tensors from here on are of this part.
  void begin(Part part) { part_ = part; }
  void embedding(const std::string& role, std::int64_t rows, std::int64_t columns) {
    matrix(role, rows, columns);
    unit_.tensors.back().moments_32 = true;
  }
  void bias(const std::string& role, std::int64_t size) { vector(role, size, Init::zeros); }
  // Drawn and decayed as weights are. Nothing where the role is empty.
  void sinks(const std::string& role, std::int64_t size) {
    if (role.empty()) return;
    vector(role, size, Init::normal);
    unit_.tensors.back().init_std = std_;
    unit_.tensors.back().decays = true;
  }
  // Nothing where the role is empty.
  void norm(NormKind kind, const std::string& role, std::int64_t size) {
    if (kind == NormKind::none || role.empty()) return;
    vector(role + ".weight", size, kind == NormKind::rms_plus_one ? Init::zeros : Init::ones);
    if (has_bias(kind)) vector(role + ".bias", size, Init::zeros);
  }
  // Of each head, with weights of its own.
  void head_norm(const std::string& role, std::int64_t heads, std::int64_t size) {
    vector(role + ".weight", heads * size, Init::ones);
    unit_.tensors.back().shape = {heads, size};
  }
  // A torch.nn.Linear: weight [out, in], or [in, out] where they are transposed. Nothing where the role is empty. std:
  // of the weight; 0: as the others.
  void linear(const std::string& role, std::int64_t out, std::int64_t in, bool with_bias, double std = 0) {
    if (role.empty()) return;
    matrix(role + ".weight", transposed_ ? in : out, transposed_ ? out : in);
    if (std > 0) unit_.tensors.back().init_std = std;
    if (with_bias) bias(role + ".bias", out);
  }

  UnitSpec take() {
    std::stable_partition(unit_.tensors.begin(), unit_.tensors.end(),
                          [](const TensorSpec& tensor) { return tensor.shape.size() > 1; });
    return std::move(unit_);
  }

 private:
  void vector(const std::string& role, std::int64_t size, Init init) {
    unit_.tensors.push_back({.name = prefix_ + role,
                             .role = role,
                             .shape = {size},
                             .init = init,
                             .init_std = 0,
                             .decays = false,
                             .moments_32 = true});
  }

  UnitSpec unit_;
  Part part_ = Part::plain;
  std::string prefix_;
  double std_;
  bool transposed_;
};

// `count` experts of a layer, from `first` on; before the first of all what every token takes.
void add_experts(const ModelConfig& c, std::int64_t first, std::int64_t count, UnitBuilder& builder) {
  const DecoderNames& names = c.names;
  const ExpertsSpec& e = c.experts;
  if (first == 0) {
    builder.begin(Part::router);
    builder.linear(names.router, e.count, c.hidden_size, e.biases);
    if (e.corrected) builder.fixed(names.router + ".e_score_correction_bias", e.count);
    builder.begin(Part::plain);
    if (e.shared_width > 0) {
      builder.linear(names.shared + ".gate_proj", e.shared_width, c.hidden_size, false);
      builder.linear(names.shared + ".up_proj", e.shared_width, c.hidden_size, false);
      builder.linear(names.shared + ".down_proj", c.hidden_size, e.shared_width, false);
      if (e.shared_gate) builder.linear(names.shared_gate, 1, c.hidden_size, false);
    }
    builder.norm(c.norm, names.mlp_norm, c.hidden_size);
  }
  builder.begin(Part::expert);
  if (!names.stacked_in.empty()) {
    const auto stack = [&](const std::string& role, std::int64_t out, std::int64_t in) {
      builder.stack(role, first, count, e.count, e.transposed ? in : out, e.transposed ? out : in);
      if (e.biases) builder.stack_biases(role + "_bias", first, count, e.count, out);
    };
    stack(names.stacked_in, 2 * e.width, c.hidden_size);
    stack(names.stacked_down, c.hidden_size, e.width);
  } else {
    for (std::int64_t i = first; i < first + count; ++i) {
      const std::string expert = names.expert + "." + std::to_string(i) + ".";
      builder.linear(expert + names.expert_gate, e.width, c.hidden_size, false);
      builder.linear(expert + names.expert_up, e.width, c.hidden_size, false);
      builder.linear(expert + names.expert_down, c.hidden_size, e.width, false);
    }
  }
  builder.begin(Part::plain);
}

// Each adds a block's attention to one unit and its MLP to the other; both may be the same.
void decoder_block(const ModelConfig& c, std::int64_t layer, UnitBuilder& attention, UnitBuilder& mlp) {
  const DecoderNames& names = c.names;
  const std::int64_t q = c.heads * c.head_dim, kv = c.kv_heads * c.head_dim;
  attention.linear(names.qkv, q + 2 * kv, c.hidden_size, c.qkv_bias);
  attention.linear(names.q, q, c.hidden_size, c.qkv_bias);
  attention.linear(names.k, kv, c.hidden_size, c.qkv_bias);
  attention.linear(names.v, kv, c.hidden_size, c.qkv_bias);
  attention.linear(names.o, c.hidden_size, q, c.output_bias, c.residual_range);
  attention.sinks(names.sinks, c.heads);
  if (c.qk_norm == QkNorm::own) {
    attention.head_norm(names.q_norm, c.heads, c.head_dim);
    attention.head_norm(names.k_norm, c.kv_heads, c.head_dim);
  } else if (c.qk_norm != QkNorm::none && c.qk_norm != QkNorm::rotated_unweighted) {
    const bool whole = c.qk_norm == QkNorm::whole;
    attention.norm(c.norm, names.q_norm, whole ? q : c.head_dim);
    attention.norm(c.norm, names.k_norm, whole ? kv : c.head_dim);
  }
  const bool experts = c.layer(layer).experts;
  if (!experts) {
    mlp.linear(names.gate_up, 2 * c.intermediate_size, c.hidden_size, c.mlp_bias);
    mlp.linear(names.gate, c.intermediate_size, c.hidden_size, c.mlp_bias);
    mlp.linear(names.up, c.intermediate_size, c.hidden_size, c.mlp_bias);
    mlp.linear(names.down, c.hidden_size, c.intermediate_size, c.mlp_bias, c.residual_range);
  }
  attention.norm(c.norm, names.attention_norm, c.hidden_size);
  attention.norm(c.norm, names.attention_out_norm, c.hidden_size);
  if (experts) return add_experts(c, 0, c.experts.count, mlp);
  mlp.norm(c.norm, names.mlp_norm, c.hidden_size);
  mlp.norm(c.norm, names.mlp_out_norm, c.hidden_size);
}

int add_unit(ModelSpec& spec, UnitSpec unit) {
  spec.units.push_back(std::move(unit));
  return static_cast<int>(spec.units.size()) - 1;
}

// The first rows of the tiles of a [vocabulary, hidden] table, and the vocabulary's end.
std::vector<std::int64_t> tile_rows(const ModelSpec& spec) {
  const ModelConfig& c = spec.config;
  const std::int64_t most = std::max<std::int64_t>(1, spec.tiling.vocabulary_elements / c.hidden_size);
  if (c.vocab_size <= most) return {0, c.vocab_size};
  const std::int64_t tiles = (c.vocab_size + most - 1) / most, even = (c.vocab_size + tiles - 1) / tiles;
  const std::int64_t rows = std::min(most, (even + 15) / 16 * 16);
  std::vector<std::int64_t> first;
  for (std::int64_t row = 0; row < c.vocab_size; row += rows) first.push_back(row);
  first.push_back(c.vocab_size);
  return first;
}

void add_embedding(ModelSpec& spec) {
  const ModelConfig& c = spec.config;
  const std::vector<std::int64_t> rows = tile_rows(spec);
  const std::size_t tiles = rows.size() - 1;
  for (std::size_t tile = 0; tile < tiles; ++tile) {
    UnitBuilder builder(tiles == 1 ? "embedding" : "embedding." + std::to_string(tile), c.names.prefix, c);
    builder.embedding(c.names.tokens, rows[tile + 1] - rows[tile], c.hidden_size);
    if (tile + 1 == tiles && !c.names.positions.empty())
      builder.embedding(c.names.positions, c.max_positions + c.position_offset, c.hidden_size);
    UnitSpec unit = builder.take();
    make_tile(unit.tensors.front(), rows[tile], c.vocab_size);
    spec.stages.push_back({.kind = StageKind::embedding,
                           .units = {add_unit(spec, std::move(unit))},
                           .first_row = rows[tile],
                           .backward_needs_input = false,
                           .backward_needs_weights = false});
  }
}

// How many experts of a layer are one stage: as many as the tiling allows, each stage but the last the same number.
std::int64_t experts_together(const ModelSpec& spec) {
  const ExpertsSpec& e = spec.config.experts;
  if (spec.tiling.experts > 0) return std::min(spec.tiling.experts, e.count);
  const std::int64_t h = spec.config.hidden_size, of_one = 3 * e.width * h + (e.biases ? 2 * e.width + h : 0);
  const std::int64_t room = spec.tiling.block_elements - 3 * e.shared_width * h - e.count * h;  // beside the first ones
  const std::int64_t most = std::clamp<std::int64_t>(room / of_one, 1, e.count);
  const std::int64_t stages = (e.count + most - 1) / most;
  return (e.count + stages - 1) / stages;
}

void add_block(ModelSpec& spec, std::int64_t index) {
  const DecoderNames& names = spec.config.names;
  const std::string name = "layers." + std::to_string(index),
                    prefix = names.prefix + names.layers + std::to_string(index) + ".";
  UnitBuilder whole(name, prefix, spec.config);
  decoder_block(spec.config, index, whole, whole);
  const std::int64_t experts = spec.config.layer(index).experts ? spec.config.experts.count : 0;
  const bool apart = experts > 0 && spec.tiling.experts_apart;
  // Halves that take the same input stay one stage.
  if (UnitSpec unit = whole.take();
      spec.config.parallel || (!apart && unit.parameters() <= spec.tiling.block_elements)) {
    spec.stages.push_back(
        {.kind = StageKind::block, .block = index, .units = {add_unit(spec, std::move(unit))}, .experts = experts});
    return;
  }
  UnitBuilder attention(name + ".attention", prefix, spec.config), mlp(name + ".mlp", prefix, spec.config);
  decoder_block(spec.config, index, attention, mlp);
  spec.stages.push_back({.kind = StageKind::attention, .block = index, .units = {add_unit(spec, attention.take())}});
  const std::int64_t together = experts == 0 ? 0 : experts_together(spec);
  if (together == experts) {
    spec.stages.push_back({.kind = StageKind::mlp,
                           .block = index,
                           .units = {add_unit(spec, mlp.take())},
                           .experts = experts,
                           .together = apart});
    return;
  }
  for (std::int64_t first = 0; first < experts; first += together) {
    const std::int64_t count = std::min(together, experts - first);
    UnitBuilder some(name + ".experts." + std::to_string(first / together), prefix, spec.config);
    add_experts(spec.config, first, count, some);
    spec.stages.push_back({.kind = StageKind::experts,
                           .block = index,
                           .units = {add_unit(spec, some.take())},
                           .first_expert = first,
                           .experts = count,
                           .together = apart});
    if (first > 0) spec.stages.back().backward_parts = {1, 2, 3};
  }
}

void add_head(ModelSpec& spec) {
  const ModelConfig& c = spec.config;
  const std::vector<std::int64_t> rows = tile_rows(spec);
  const std::size_t tiles = rows.size() - 1;
  const auto add_norm = [&](UnitBuilder& builder) { builder.norm(c.norm, c.names.norm, c.hidden_size); };
  const auto own_unit = [&](UnitBuilder& builder) {
    UnitSpec unit = builder.take();
    return unit.tensors.empty() ? std::vector<int>{} : std::vector<int>{add_unit(spec, std::move(unit))};
  };
  if (tiles > 1) {
    UnitBuilder norm("head.norm", "", c);
    add_norm(norm);
    spec.stages.push_back({.kind = StageKind::norm, .units = own_unit(norm)});
  }
  for (std::size_t tile = 0; tile < tiles; ++tile) {
    UnitBuilder builder(tiles == 1 ? "head" : "head." + std::to_string(tile), "", c);
    if (!c.tie_word_embeddings) builder.matrix(c.names.head, rows[tile + 1] - rows[tile], c.hidden_size);
    if (tiles == 1) add_norm(builder);
    StageSpec stage{.kind = tile + 1 == tiles ? StageKind::head : StageKind::head_tile,
                    .units = own_unit(builder),
                    .first_row = rows[tile],
                    .backward_needs_input = false};
    if (c.tie_word_embeddings)
      stage.units.push_back(static_cast<int>(tile));  // the embedding's units come first
    else
      make_tile(spec.units.back().tensors.front(), rows[tile], c.vocab_size);
    spec.stages.push_back(std::move(stage));
  }
}

}  // namespace

void build_units(ModelSpec& spec) {
  add_embedding(spec);
  for (std::int64_t i = 0; i < spec.config.layers; ++i) add_block(spec, i);
  add_head(spec);
}

}  // namespace tierflow

#include "runtime/planning/stage_cost.h"

#include <algorithm>

#include "runtime/spec/weight_format.h"
#include "swap/layout.h"

namespace tierflow {
namespace {

// Bytes that kernels read and write for one token, by number of the hidden size, of the heads' numbers and of the MLP's
// width: each of a model's own operations is one kernel on CUDA, and products and attention are torch's.
constexpr double kNorm = 4, kAdd = 6, kNormBackward = 8;  // the latter adds the residual's gradient
constexpr double kSumAgain = 2;                           // a norm need not read what it adds up itself
constexpr double kRotation = 4, kHeadNorm = 4, kHeadNormBackward = 6;
constexpr double kGate = 6, kGateBackward = 12;
constexpr double kLogit = 6;        // of a logit: its product writes it, the loss reads it and writes its gradient
constexpr double kGradientSum = 8;  // of a weight: the product reads its fp32 sum and writes it
// As a test counts them (launches_test.cpp), with attention's own.
constexpr double kBlockLaunches = 14, kBlockBackwardLaunches = 31;
constexpr double kExpertLaunches = 9, kExpertBackwardLaunches = 23;  // of an expert, which computes again (experts.cpp)
constexpr double kChunkLaunches = 5;                                 // of the head, for a chunk of logits
constexpr double kFewLaunches = 16;                                  // of a stage that is no block

constexpr double kProductTile = 1 << 22, kHeadChunk = 1 << 27;  // numbers

// The sizes by which a stage's bytes go.
struct Sizes {
  double tokens = 0, hidden = 0, q = 0, kv = 0, heads = 0, kv_heads = 0;
  double width = 0;        // of what a token passes in an MLP: gate, and as many of up
  double halves = 0;       // of the MLP's width: gate and up, or up alone
  double chosen = 0;       // experts of a token
  double experts = 0;      // that its router scores
  double head_norms = 0;   // 1 where q and k have norms
  double masks = 0;        // 1 where dropout follows the halves
  bool by_hand = true;     // its gradient is not autograd's
  double tensor_norm = 0;  // 1 where norms follow the halves
  double statistics = 0;   // bytes that a norm keeps of each row
};

Sizes sizes_of(const ModelSpec& spec, const StageSpec& stage, double tokens) {
  const ModelConfig& c = spec.config;
  Sizes sizes{.tokens = tokens,
              .hidden = static_cast<double>(c.hidden_size),
              .q = static_cast<double>(c.heads * c.head_dim),
              .kv = static_cast<double>(c.kv_heads * c.head_dim),
              .heads = static_cast<double>(c.heads),
              .kv_heads = static_cast<double>(c.kv_heads),
              .width = static_cast<double>(c.intermediate_size),
              .halves = c.gated ? 2.0 : 1.0,
              .head_norms = c.qk_norm == QkNorm::none ? 0.0 : 1.0,
              .masks = c.residual_dropout > 0 ? 1.0 : 0.0,
              .by_hand = c.adapter_dropout == 0,
              .tensor_norm = c.names.attention_out_norm.empty() ? 0.0 : 1.0,
              .statistics = subtracts_mean(c.norm) ? 8.0 : 4.0};
  if (stage.kind == StageKind::experts || (stage.block >= 0 && c.layer(stage.block).experts)) {
    sizes.chosen = static_cast<double>(c.experts.per_token);
    sizes.experts = static_cast<double>(c.experts.count);
    sizes.width = static_cast<double>(c.experts.per_token * c.experts.width + c.experts.shared_width);
  }
  return sizes;
}

bool attends(StageKind kind) {
  return kind == StageKind::block || kind == StageKind::attention;
}
bool expands(StageKind kind) {
  return kind == StageKind::block || kind == StageKind::mlp || kind == StageKind::experts;
}
bool is_head(StageKind kind) {
  return kind == StageKind::head || kind == StageKind::head_tile;
}

void add_products(const ModelSpec& spec, const StageSpec& of, double tokens, StageCost& cost) {
  const ExpertsSpec& experts = spec.config.experts;
  const double share =  // of the tokens, at an expert
      experts.count == 0 ? 0.0 : static_cast<double>(experts.per_token) / static_cast<double>(experts.count);
  const auto add = [&](const TensorSpec& tensor) {
    const auto elements = static_cast<double>(tensor.elements());
    const double product = 2 * tokens * elements * (tensor.part == Part::expert ? share : 1.0);
    cost.forward_products += product;
    cost.backward_products += (tensor.trainable ? 2 : 1) * product;
    cost.last_product = product;  // tensors come in the order of the forward
    if (tensor.trainable) cost.backward_bytes += kGradientSum * elements;
    if (tensor.format == WeightFormat::bf16) return;
    const double dense = 2.0 * static_cast<double>(tensor.words()) + 2 * elements;  // made bf16 at each visit
    cost.forward_bytes += dense;
    cost.backward_bytes += dense;
  };
  if (is_head(of.kind)) {
    add(spec.units[of.units.back()].tensors.front());
    return;
  }
  if (of.kind == StageKind::embedding) return;
  for (const int unit : of.units)
    for (const TensorSpec& tensor : spec.units[unit].tensors)
      if (tensor.shape.size() > 1 && tensor.decays) add(tensor);
}

// Keys that a query sees, on average.
double keys_seen(const ModelSpec& spec, const StageSpec& of, double length) {
  const LayerSpec layer = spec.config.layer(of.block);
  const auto window = static_cast<double>(layer.window), chunk = static_cast<double>(layer.chunk);
  if (chunk > 0) return std::min(length, chunk) / 2;
  const double seen = window == 0 ? length : std::min(length, window);
  return seen - seen * seen / (2 * length);
}

void add_block(const ModelSpec& spec, const StageSpec& of, const Sizes& s, double length, StageCost& cost) {
  double kept = 0, swapped = 0, peak = 0, keeping = 0;  // bytes a token
  double forward = 0, backward = 0;
  if (attends(of.kind)) {
    cost.attention = 4 * s.tokens * keys_seen(spec, of, length) * s.q;
    kept += 2 * (s.hidden + 2 * s.q + 2 * s.kv) + s.statistics + 4 * s.heads +
            (2 * s.tensor_norm + s.masks) * s.hidden +
            s.head_norms * (2 * (s.q + s.kv) + s.statistics * (s.heads + s.kv_heads));
    swapped += 2 * (2 * s.q + 2 * s.kv) + 4 * s.heads + 2 * s.tensor_norm * s.hidden;
    peak = 2 * (s.hidden + s.q + 2 * s.kv) + 8 * s.q;  // with the sums of flash attention's backward
    keeping = 4 * s.hidden;
    const double rotations = (kRotation + s.head_norms * kHeadNorm) * (s.q + s.kv);
    forward += kNorm * s.hidden + rotations + kAdd * s.hidden;
    cost.restored_bytes += s.tokens * (kNorm * s.hidden + rotations);
    backward += kNormBackward * s.hidden + (kRotation + s.head_norms * kHeadNormBackward) * (s.q + s.kv);
  }
  if (expands(of.kind)) {
    const bool whole = of.kind == StageKind::block;
    kept += 2 * (s.hidden + s.halves * s.width) + s.statistics + (2 * s.tensor_norm + s.masks) * s.hidden;
    if (whole) kept += 2 * s.hidden;
    swapped += 2 * s.halves * s.width + 2 * s.tensor_norm * s.hidden + (whole ? 2 * s.hidden : 0);
    kept += 2 * s.experts + 36 * s.chosen;
    swapped += 2 * s.experts;
    // Of experts the tokens' rows are gathered, and results added up in fp32.
    const double gathered = s.chosen == 0 ? 0.0 : (4 * s.chosen + 6) * s.hidden + 4 * s.width;
    peak = std::max(peak, 2 * s.width + gathered);
    keeping = std::max(keeping, 2 * s.width + 2 * s.hidden + gathered / 2);
    forward += (kNorm + kAdd) * s.hidden + kGate * s.width;
    if (whole && !spec.config.parallel) forward -= kSumAgain * s.hidden;
    cost.restored_bytes += s.tokens * kNorm * s.hidden;
    backward += kNormBackward * s.hidden + kGateBackward * s.width;
  }
  // What is added, before and after dropout, its mask, and its gradient.
  peak += 7 * s.masks * s.hidden;
  keeping += 2 * s.masks * s.hidden;
  if (of.kind == StageKind::experts) peak += 10 * s.hidden;
  if (!s.by_hand) {  // autograd keeps more, and nothing can be kept from forward to backward
    kept = (attends(of.kind) ? 17 * s.hidden : 0) + (expands(of.kind) ? 4 * s.width : 0);
    peak = (attends(of.kind) ? 8 * s.q : 4 * s.hidden) + (expands(of.kind) ? 2 * s.width : 0);
  }
  cost.forward_bytes += s.tokens * forward;
  cost.backward_bytes += s.tokens * backward;
  const double part = of.kind == StageKind::block ? 1 : 0.5;
  const double experts = of.kind == StageKind::experts ? static_cast<double>(of.experts) : s.experts;
  const double used = expands(of.kind) ? std::min(experts, s.tokens * s.chosen) : 0.0;
  cost.forward_launches = part * kBlockLaunches + used * kExpertLaunches;
  cost.backward_launches = part * kBlockBackwardLaunches + used * kExpertBackwardLaunches;
  double largest = 0;  // weight
  for (const int unit : of.units)
    for (const TensorSpec& tensor : spec.units[unit].tensors)
      if (tensor.trainable) largest = std::max(largest, static_cast<double>(tensor.elements()));
  cost.peak = static_cast<std::uint64_t>(s.tokens * (kept + peak) + 6 * std::min(largest, kProductTile));
  if (!s.by_hand || of.kind == StageKind::experts || !of.on_demand.empty()) return;
  cost.activation_bytes = static_cast<std::uint64_t>(s.tokens * kept);
  cost.swapped_bytes = swap::round_up(static_cast<std::uint64_t>(s.tokens * swapped), swap::kSector);
  cost.keeping_peak = static_cast<std::uint64_t>(s.tokens * (kept + keeping));
}

void add_edge(const ModelSpec& spec, const StageSpec& of, const Sizes& s, StageCost& cost) {
  const double hidden = s.tokens * s.hidden;
  cost.forward_launches = cost.backward_launches = kFewLaunches;
  if (of.kind == StageKind::embedding) {
    cost.forward_bytes += 4 * hidden;
    cost.backward_bytes += 10 * hidden;
    cost.peak = static_cast<std::uint64_t>(6 * hidden);
  } else if (of.kind == StageKind::norm) {
    cost.forward_bytes += kNorm * hidden;
    cost.backward_bytes += kNormBackward * hidden;
    cost.peak = static_cast<std::uint64_t>(4 * hidden + 12 * s.tokens);
  } else {
    const TensorSpec& weight = spec.units[of.units.back()].tensors.front();
    const double logits = s.tokens * static_cast<double>(weight.shape.front());
    if (of.kind == StageKind::head) {
      cost.forward_bytes += kNorm * hidden;
      cost.backward_bytes += kNormBackward * hidden;
    }
    // A tile's backward computes its logits again.
    if (of.kind == StageKind::head_tile) cost.backward_products += cost.forward_products;
    cost.forward_bytes += kLogit / 3 * logits;
    cost.backward_bytes += kLogit * 2 / 3 * logits;
    cost.forward_launches += kChunkLaunches / 3 * logits / kHeadChunk;
    cost.backward_launches += kChunkLaunches * 2 / 3 * logits / kHeadChunk;
    cost.peak = static_cast<std::uint64_t>(8 * hidden + 16 * s.tokens + 2 * std::min(logits, kHeadChunk) +
                                           6 * std::min(static_cast<double>(weight.elements()), kProductTile));
  }
}

}  // namespace

StageCost stage_cost(const ModelSpec& spec, int stage, std::int64_t micro_batch, std::int64_t sequence_length) {
  const StageSpec& of = spec.stages[stage];
  const Sizes sizes = sizes_of(spec, of, static_cast<double>(micro_batch * sequence_length));
  StageCost cost;
  add_products(spec, of, sizes.tokens, cost);
  if (attends(of.kind) || expands(of.kind))
    add_block(spec, of, sizes, static_cast<double>(sequence_length), cost);
  else
    add_edge(spec, of, sizes, cost);
  const StageKind before = stage == 0 ? StageKind::embedding : spec.stages[stage - 1].kind;
  double handed = 2 * sizes.hidden, taken = 2 * sizes.hidden;  // bytes a token
  if (is_head(of.kind) && (before == StageKind::norm || before == StageKind::head_tile)) {
    taken += 32;                     // running sums of the softmax
    handed = 6 * sizes.hidden + 24;  // backward: the gradient's fp32 sum, the normed states, a factor
  }
  if (of.kind == StageKind::experts) {
    if (before == StageKind::experts) taken += 12 * sizes.chosen;
    handed = 10 * sizes.hidden + 8;
  }
  if (stage > 0) cost.carry_bytes = swap::round_up(static_cast<std::uint64_t>(taken * sizes.tokens), swap::kSector);
  cost.handed_bytes = static_cast<std::uint64_t>(handed * sizes.tokens);
  return cost;
}

std::uint64_t shared_bytes(const ModelSpec& spec, std::int64_t micro_batch, std::int64_t sequence_length) {
  std::int64_t tables = 0;
  for (const RopeSpec& rope : spec.config.ropes) tables += 4 * sequence_length * rope.rotated(spec.config.head_dim);
  return static_cast<std::uint64_t>(tables + 2 * 8 * micro_batch * sequence_length);
}

}  // namespace tierflow

#include "runtime/models/key_value_cache.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "runtime/base/exception.h"

namespace tierflow {
namespace {

using at::Tensor;

constexpr std::int64_t kQueries = 128;  // whose scores exist at once

// Attention of the last q.size(0) of k.size(0) tokens: q [queries, heads, head_dim], k, v [tokens, kv heads, head_dim],
// the latter in the type that sums have.
Tensor attention_of_last(const Tensor& q, const Tensor& k, const Tensor& v, const models::AttentionRules& rules) {
  const auto wide = k.scalar_type();
  const std::int64_t queries = q.size(0), heads = q.size(1), dim = q.size(2), tokens = k.size(0), kv_heads = k.size(1),
                     groups = heads / kv_heads;
  const double scale = rules.scale > 0 ? rules.scale : 1.0 / std::sqrt(static_cast<double>(dim));
  // [kv heads, groups * queries, head_dim], [kv heads, head_dim, tokens], [kv heads, tokens, head_dim]
  const Tensor by_head = q.to(wide)
                             .view({queries, kv_heads, groups, dim})
                             .permute({1, 2, 0, 3})
                             .reshape({kv_heads, groups * queries, dim});
  Tensor scores = at::bmm(by_head, k.permute({1, 2, 0})).mul_(scale);
  if (rules.softcap > 0) scores.div_(rules.softcap).tanh_().mul_(rules.softcap);
  scores = scores.view({kv_heads, groups, queries, tokens});
  const Tensor key = at::arange(tokens, q.options().dtype(at::kLong)),
               query = at::arange(tokens - queries, tokens, q.options().dtype(at::kLong)).unsqueeze(1);
  Tensor hidden = key.gt(query);
  if (rules.window > 0) hidden = hidden.logical_or(key.le(query - rules.window));
  scores.masked_fill_(hidden, -std::numeric_limits<double>::infinity());
  if (rules.sinks.defined()) {
    const Tensor sinks = rules.sinks.to(wide).view({kv_heads, groups, 1, 1}).expand({kv_heads, groups, queries, 1});
    scores = at::softmax(at::cat({scores, sinks}, -1), -1).narrow(-1, 0, tokens);
  } else {
    scores = at::softmax(scores, -1);
  }
  const Tensor attended = at::bmm(scores.reshape({kv_heads, groups * queries, tokens}), v.transpose(0, 1));
  return attended.view({kv_heads, groups, queries, dim})
      .permute({2, 0, 1, 3})
      .reshape({queries, heads, dim})
      .to(q.scalar_type());
}

}  // namespace

KeyValueCache::KeyValueCache(const ModelSpec& spec, std::vector<std::int64_t> capacities)
    : capacities_(std::move(capacities)), layers_(capacities_.size()) {
  for (auto& of_sequence : layers_) of_sequence.resize(spec.stages.size());
}

std::uint64_t KeyValueCache::workspace(const ModelSpec& spec, std::int64_t capacity, std::int64_t queries) {
  const ModelConfig& c = spec.config;
  constexpr std::int64_t kStored = 2, kWide = 4, kCopies = 3;  // of scores: before and after the softmax, and masked
  const std::int64_t tokens = 2 * c.kv_heads * c.head_dim * (kStored + kWide),
                     scores = kCopies * kWide * c.heads * std::min(kQueries, queries);
  return static_cast<std::uint64_t>(capacity * (tokens + scores));
}

std::uint64_t KeyValueCache::bytes(const ModelSpec& spec, std::int64_t capacity) {
  const auto attends = std::count_if(spec.stages.begin(), spec.stages.end(), [](const StageSpec& stage) {
    return stage.kind == StageKind::block || stage.kind == StageKind::attention;
  });
  constexpr std::uint64_t kWord = 2;
  return 2 * kWord * static_cast<std::uint64_t>(attends * capacity * spec.config.kv_heads * spec.config.head_dim);
}

Tensor KeyValueCache::attend(int stage, const Tensor& q, const Tensor& k, const Tensor& v,
                             const models::AttentionRules& rules, const std::vector<CachedSpan>& spans) {
  models::AttentionRules alone = rules;
  alone.documents.clear();
  std::vector<Tensor> parts;
  for (const CachedSpan& span : spans) {
    const auto part = [&](const Tensor& x) { return x.narrow(1, span.begin, span.length); };
    const std::int64_t capacity = capacities_.at(static_cast<std::size_t>(span.sequence)),
                       end = span.before + span.length;
    if (end > capacity)
      throw Exception(io::ErrorKind::internal, "a sequence of " + std::to_string(end) +
                                                   " tokens does not fit a cache of " + std::to_string(capacity));
    Layer& layer = layers_[static_cast<std::size_t>(span.sequence)].at(static_cast<std::size_t>(stage));
    if (layer.memory == nullptr) {
      if (span.before != 0) throw Exception(io::ErrorKind::internal, "a sequence continues that never began");
      const std::int64_t bytes = capacity * k.size(2) * k.size(3) * k.element_size();
      layer.memory.reset(new std::byte[static_cast<std::size_t>(2 * bytes)]);  // not touched: taken as it is written
      const auto options = at::TensorOptions().dtype(k.scalar_type());
      layer.keys = at::from_blob(layer.memory.get(), {capacity, k.size(2), k.size(3)}, options);
      layer.values = at::from_blob(layer.memory.get() + bytes, {capacity, k.size(2), k.size(3)}, options);
    }
    layer.keys.narrow(0, span.before, span.length).copy_(part(k)[0]);
    layer.values.narrow(0, span.before, span.length).copy_(part(v)[0]);
    if (span.before == 0) {
      parts.push_back(models::attention(part(q), part(k), part(v), alone, 0));
      continue;
    }
    const Tensor queries = part(q)[0];
    const auto wide = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const auto all = [&](const Tensor& cached) { return cached.narrow(0, 0, end).to(q.device()).to(wide); };
    const Tensor keys = all(layer.keys), values = all(layer.values);
    for (std::int64_t first = 0; first < span.length; first += kQueries) {
      const std::int64_t count = std::min(kQueries, span.length - first), seen = span.before + first + count;
      parts.push_back(
          attention_of_last(queries.narrow(0, first, count), keys.narrow(0, 0, seen), values.narrow(0, 0, seen), alone)
              .unsqueeze(0));
    }
  }
  return at::cat(parts, 1);
}

Tensor models::attention_of_row(int stage, const Tensor& q, const Tensor& k, const Tensor& v,
                                const AttentionRules& rules, const Shared& shared, double dropout) {
  AttentionRules of_row = rules;
  of_row.ends = shared.ends;
  of_row.choice = shared.attention;
  return shared.cache != nullptr ? shared.cache->attend(stage, q, k, v, of_row, shared.spans)
                                 : attention(q, k, v, of_row, dropout);
}

}  // namespace tierflow

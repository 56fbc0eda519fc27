#include "runtime/models/key_value_cache.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "runtime/base/exception.h"
#include "runtime/models/attention_kernels.h"
#include "runtime/models/grain.h"
#include "runtime/models/key_value_store.h"
#include "runtime/models/upload.h"
#include "runtime/spec/generation_shape.h"

namespace tierflow {
namespace {

using at::Tensor;

constexpr std::int64_t kQueries = kAttendedQueries;
constexpr std::int64_t kWordBytes = 2;  // of what lies on storage

// Calls use(first token of `all`, first slot, tokens) for each run of slots of tokens [begin, end).
template <class Use>
void for_each_run(std::int64_t begin, std::int64_t end, std::int64_t slots, Use use) {
  for (std::int64_t at = begin; at < end;) {
    const std::int64_t slot = at % slots, count = std::min(end - at, slots - slot);
    use(at - begin, slot, count);
    at += count;
  }
}

// all [1, tokens, kv heads, head_dim], of which the last ones are kept: token `before` of the sequence is the first.
void keep(const Tensor& kept, const Tensor& all, std::int64_t before) {
  const std::int64_t slots = kept.size(1), end = before + all.size(1), begin = std::max(before, end - slots);
  const Tensor last = models::download(all[0].narrow(0, begin - before, end - begin));
  for_each_run(begin, end, slots, [&](std::int64_t first, std::int64_t slot, std::int64_t count) {
    kept.narrow(1, slot, count).copy_(last.narrow(0, first, count).transpose(0, 1));
  });
}

// Tokens [begin, before) of what is kept, then `more` [1, tokens, kv heads, head_dim]: [tokens, kv heads, head_dim] in
// the type that sums have.
Tensor seen(const Tensor& kept, std::int64_t begin, std::int64_t before, const Tensor& more, at::ScalarType wide) {
  std::vector<Tensor> parts;
  for_each_run(begin, before, kept.size(1), [&](std::int64_t, std::int64_t slot, std::int64_t count) {
    parts.push_back(kept.narrow(1, slot, count).transpose(0, 1));
  });
  parts = models::upload(parts, more.device());
  parts.push_back(more[0]);
  return at::cat(parts).to(wide);
}

// Whether the kernel below takes them.
bool has_kernel(const Tensor& q, const CachedSpan& span) {
  return span.before > 0 && span.length == 1 && q.scalar_type() == at::kBFloat16;
}

const std::uint16_t* words_of(const Tensor& x) {
  return static_cast<const std::uint16_t*>(x.const_data_ptr());
}

// Spans of one token each, whose keys and values are kept already.
struct OneToken {
  Tensor q, out, keys, values;         // q, out [heads, head_dim]; as Layer has them
  std::int64_t first = 0, tokens = 0;  // of those that are seen: the slot of the first one, and how many they are
};
void attend_one_each(const std::vector<OneToken>& items, const models::AttentionRules& rules) {
  if (items.empty()) return;
  const std::int64_t kv_heads = items[0].keys.size(0), dim = items[0].keys.size(2),
                     groups = items[0].q.size(0) / kv_heads;
  std::int64_t longest = 0;
  for (const OneToken& item : items) longest = std::max(longest, item.tokens);
  const Tensor sinks = rules.sinks.defined() ? models::download(rules.sinks).to(at::kFloat).contiguous() : Tensor();
  const auto count = static_cast<std::int64_t>(items.size()) * kv_heads;
  at::parallel_for(0, count, models::grain_rows(longest * dim), [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> scores(static_cast<std::size_t>(longest)), sums(static_cast<std::size_t>(dim));
    for (std::int64_t i = begin; i < end; ++i) {
      const OneToken& item = items[static_cast<std::size_t>(i / kv_heads)];
      const std::int64_t kv_head = i % kv_heads;
      const models::kernels::KeptHead kept{.keys = words_of(item.keys) + kv_head * item.keys.stride(0),
                                           .values = words_of(item.values) + kv_head * item.values.stride(0),
                                           .slots = item.keys.size(1),
                                           .first = item.first,
                                           .tokens = item.tokens,
                                           .dim = dim};
      for (std::int64_t head = kv_head * groups; head < (kv_head + 1) * groups; ++head)
        models::kernels::attend_one(
            words_of(item.q) + head * item.q.stride(0), kept,
            {.scale = static_cast<float>(rules.scale_of(dim)),
             .softcap = static_cast<float>(rules.softcap),
             .sink = sinks.defined() ? sinks.const_data_ptr<float>() + head : nullptr},
            scores.data(), sums.data(),
            static_cast<std::uint16_t*>(item.out.mutable_data_ptr()) + head * item.out.stride(0));
    }
  });
}

// Bytes [begin, end) of a slab that hold tokens [first, end) of a sequence, in whole blocks.
KeyValueStore::Part part_of_tokens(std::int64_t first, std::int64_t end, std::int64_t slots, std::int64_t token_bytes) {
  if (first >= end) return {};
  const std::int64_t block = kSlabAlignment;
  const auto up = [&](std::int64_t bytes) { return static_cast<std::uint64_t>((bytes + block - 1) / block * block); };
  if (end - first >= slots || first % slots + (end - first) > slots)
    return {.begin = 0, .end = up(slots * token_bytes)};
  const std::int64_t begin = first % slots * token_bytes;
  return {.begin = static_cast<std::uint64_t>(begin / block * block), .end = up(begin + (end - first) * token_bytes)};
}

// Attention of the last q.size(0) of k.size(0) tokens: q [queries, heads, head_dim], k, v [tokens, kv heads, head_dim],
// the latter in the type that sums have. Where the rules have chunks, one begins with the first token.
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
  if (rules.chunk > 0) hidden = hidden.logical_or(key.lt(query - query.remainder(rules.chunk)));
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

KeyValueCache::KeyValueCache(const ModelSpec& spec, std::vector<std::int64_t> capacities, std::int64_t longest_span,
                             KeyValueStore* store)
    : spec_(spec),
      capacities_(std::move(capacities)),
      longest_span_(longest_span),
      store_(store),
      layers_(capacities_.size()) {
  for (auto& of_sequence : layers_) of_sequence.resize(spec.stages.size());
  if (store_ != nullptr) store_->clear();
}

bool KeyValueCache::stores(int stage) const {
  return store_ != nullptr && store_->stores(stage);
}

std::int64_t KeyValueCache::reach_of(int stage) const {
  return spec_.config.layer(spec_.stages[static_cast<std::size_t>(stage)].block).reach();
}

std::int64_t KeyValueCache::slots_of(std::int64_t sequence, std::int64_t reach) const {
  return kept_tokens(capacities_.at(static_cast<std::size_t>(sequence)), reach, longest_span_);
}

void KeyValueCache::expect(const std::vector<CachedRow>& rows) {
  if (store_ == nullptr) return;
  const ModelConfig& config = spec_.config;
  std::vector<KeyValueStore::Visit> order;
  for (int stage = 0; stage < static_cast<int>(spec_.stages.size()); ++stage) {
    if (!stores(stage)) continue;
    const std::int64_t reach = reach_of(stage);
    for (const CachedRow& row : rows)
      for (const CachedSpan& span : row.spans)
        order.push_back(
            {.stage = stage,
             .sequence = span.sequence,
             .part = part_of_tokens(0, span.before, slots_of(span.sequence, reach), config.head_dim * kWordBytes)});
  }
  store_->expect(std::move(order));
}

void KeyValueCache::bring(Layer& layer, int stage, const CachedSpan& span, const Tensor& k) {
  const std::int64_t heads = k.size(2), dim = k.size(3),
                     slab = static_cast<std::int64_t>(store_->of_slab(stage)) / kWordBytes;
  if (k.element_size() != kWordBytes || layer.slots * dim > slab)
    fail_usage("a sequence is longer than those that SessionOptions::cache was made of");
  std::byte* memory = store_->take({.stage = stage,
                                    .sequence = span.sequence,
                                    .part = part_of_tokens(0, span.before, layer.slots, dim * kWordBytes)});
  const auto options = at::TensorOptions().dtype(k.scalar_type());
  const auto view = [&](std::int64_t first) {
    return at::from_blob(memory + first * slab * kWordBytes, {heads, layer.slots, dim}, {slab, dim, 1}, options);
  };
  layer.keys = view(0);
  layer.values = view(heads);
}

void KeyValueCache::put_back(const Layer& layer, int stage, const CachedSpan& span) const {
  store_->put_back(
      stage, span.sequence,
      part_of_tokens(span.before, span.before + span.length, layer.slots, layer.keys.size(2) * kWordBytes));
}

void KeyValueCache::replace(std::int64_t sequence, std::int64_t capacity) {
  const auto at = static_cast<std::size_t>(sequence);
  capacities_.at(at) = capacity;
  for (Layer& layer : layers_[at]) layer = {};
}

bool KeyValueCache::rewind(std::int64_t sequence, std::int64_t tokens) {
  std::vector<Layer>& layers = layers_.at(static_cast<std::size_t>(sequence));
  for (const Layer& layer : layers)
    if (layer.reach > 0 && std::max<std::int64_t>(0, tokens - layer.reach) < layer.tokens - layer.slots) return false;
  for (Layer& layer : layers) layer.tokens = std::min(layer.tokens, tokens);
  return true;
}

KeyValueCache::Layer& KeyValueCache::layer_of(int stage, const CachedSpan& span, const Tensor& k) {
  const std::int64_t capacity = capacities_.at(static_cast<std::size_t>(span.sequence)),
                     end = span.before + span.length;
  if (end > capacity)
    throw Exception(io::ErrorKind::internal, "a sequence of " + std::to_string(end) +
                                                 " tokens does not fit a cache of " + std::to_string(capacity));
  Layer& layer = layers_[static_cast<std::size_t>(span.sequence)].at(static_cast<std::size_t>(stage));
  // A stage that is computed once more has its tokens already.
  if (layer.tokens != span.before && layer.tokens != end)
    throw Exception(io::ErrorKind::internal, "a sequence goes on where it did not end");
  layer.tokens = end;
  layer.reach = reach_of(stage);
  layer.slots = slots_of(span.sequence, layer.reach);
  if (stores(stage)) {
    bring(layer, stage, span, k);
    return layer;
  }
  if (layer.memory != nullptr) return layer;
  const std::int64_t slots = layer.slots, bytes = slots * k.size(2) * k.size(3) * k.element_size();
  layer.memory.reset(new std::byte[static_cast<std::size_t>(2 * bytes)]);  // not touched: taken as it is written
  const auto options = at::TensorOptions().dtype(k.scalar_type());
  layer.keys = at::from_blob(layer.memory.get(), {k.size(2), slots, k.size(3)}, options);
  layer.values = at::from_blob(layer.memory.get() + bytes, {k.size(2), slots, k.size(3)}, options);
  return layer;
}

Tensor KeyValueCache::attend(int stage, const Tensor& q, const Tensor& k, const Tensor& v,
                             const models::AttentionRules& rules, const std::vector<CachedSpan>& spans) {
  models::AttentionRules alone = rules;
  alone.choice.any_length = true;
  const Tensor out = at::empty(q.sizes(), q.options());
  // One token each is attended to on the host, where all keys and values are: fewer bytes cross the link.
  const bool any = std::ranges::any_of(spans, [&](const CachedSpan& span) { return has_kernel(q, span); });
  const auto on_host = [&](const Tensor& x) { return any ? models::download(x).contiguous() : Tensor(); };
  const Tensor q_here = on_host(q), k_here = on_host(k), v_here = on_host(v),
               out_here = any && !q.is_cpu() ? at::empty(q.sizes(), q_here.options()) : out;
  std::vector<OneToken> ones;
  std::vector<std::pair<const Layer*, const CachedSpan*>> brought;  // from storage
  const auto finish = [&] {
    attend_one_each(ones, rules);
    ones.clear();
    for (const auto& [layer, span] : brought) put_back(*layer, stage, *span);
    brought.clear();
  };
  for (const CachedSpan& span : spans) {
    if (stores(stage) && brought.size() >= store_->most_taken()) finish();
    const auto part = [&](const Tensor& x) { return x.narrow(1, span.begin, span.length); };
    Layer& layer = layer_of(stage, span, k);
    if (stores(stage)) brought.emplace_back(&layer, &span);
    const std::int64_t slots = layer.slots, end = span.before + span.length;
    const auto keep_both = [&](const Tensor& keys, const Tensor& values) {
      keep(layer.keys, part(keys), span.before);
      keep(layer.values, part(values), span.before);
    };
    if (has_kernel(q, span)) {
      keep_both(k_here, v_here);
      const std::int64_t count = rules.window > 0  ? std::min(end, rules.window)
                                 : rules.chunk > 0 ? (end - 1) % rules.chunk + 1
                                                   : end;
      ones.push_back({.q = part(q_here)[0][0],
                      .out = part(out_here)[0][0],
                      .keys = layer.keys,
                      .values = layer.values,
                      .first = (end - count) % slots,
                      .tokens = count});
      continue;
    }
    if (span.before == 0) {
      alone.documents = models::in_chunks({}, 1, span.length, rules.chunk);
      part(out).copy_(models::attention(part(q), part(k), part(v), alone, 0));
      keep_both(k, v);
      continue;
    }
    const auto wide = models::wide_type(q);
    const std::int64_t begin = rules.window > 0  ? std::max<std::int64_t>(0, span.before - rules.window)
                               : rules.chunk > 0 ? span.before - span.before % rules.chunk
                                                 : 0,
                       behind = span.before - begin;
    const Tensor keys = seen(layer.keys, begin, span.before, part(k), wide),
                 values = seen(layer.values, begin, span.before, part(v), wide);
    keep_both(k, v);
    for (std::int64_t first = 0; first < span.length; first += kQueries) {
      const std::int64_t count = std::min(kQueries, span.length - first), tokens = behind + first + count;
      part(out).narrow(1, first, count)[0].copy_(attention_of_last(
          part(q)[0].narrow(0, first, count), keys.narrow(0, 0, tokens), values.narrow(0, 0, tokens), alone));
    }
  }
  finish();
  if (any && !q.is_cpu()) {
    const Tensor there = models::upload({out_here}, q.device()).front();
    if (std::ranges::all_of(spans, [&](const CachedSpan& span) { return has_kernel(q, span); })) return there;
    for (const CachedSpan& span : spans)
      if (has_kernel(q, span)) out.narrow(1, span.begin, span.length).copy_(there.narrow(1, span.begin, span.length));
  }
  return out;
}

Tensor models::attention_of_row(int stage, const Tensor& q, const Tensor& k, const Tensor& v,
                                const AttentionRules& rules, const Shared& shared, double dropout) {
  return shared.cache != nullptr ? shared.cache->attend(stage, q, k, v, rules, shared.spans)
                                 : attention(q, k, v, rules, dropout);
}

}  // namespace tierflow

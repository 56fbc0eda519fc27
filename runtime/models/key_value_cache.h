#pragma once
// Keys and values of tokens that were computed, so that the next token costs the computation of one token only.
#include <cstddef>
#include <memory>
#include <vector>

#include "runtime/models/attention.h"
#include "runtime/models/layered_model.h"

namespace tierflow {

class KeyValueStore;

// In host memory, or of the layers that KeyValueStore::stores() names on storage, on any device; what a visit attends
// to is copied to the device where that has memory of its own. Where they lie changes no bit. Of a layer with a window
// or chunks only the last tokens of a sequence are there, in a ring: as many as a query sees at most, and as the
// longest span has, so that a stage may be computed once more.
class KeyValueCache {
 public:
  static constexpr std::int64_t kAnySpan = std::int64_t{1} << 40;

  // capacities: the most tokens of each sequence. Memory is taken as tokens are added. longest_span: tokens of a span
  // that continues a sequence, at most. store: made for these; it outlives the cache, which uses it alone; null: all is
  // in host memory.
  KeyValueCache(const ModelSpec& spec, std::vector<std::int64_t> capacities, std::int64_t longest_span = kAnySpan,
                KeyValueStore* store = nullptr);

  // Frees the keys and values of `sequence`. Another sequence may begin in its place.
  void replace(std::int64_t sequence, std::int64_t capacity);

  // Leaves of a sequence its first `tokens`, of those that came: the next span continues these. False, and nothing
  // changes, where a layer with a window or chunks has let go of some that a further span may see.
  bool rewind(std::int64_t sequence, std::int64_t tokens);

  // Announces the rows of the next pass, all of this cache: what they need is read ahead from storage.
  void expect(const std::vector<CachedRow>& rows);

  // Attention of an attention stage for a row that continues sequences: q, k, v [1, tokens, ..] as in
  // models::attention(), rotated, cut by `spans`. A span sees what its sequence has in the cache, and itself up to each
  // query; its keys and values are added to the cache. A span that begins its sequence has the bits of attention() on
  // the span alone; in others scores and sums are fp32. The bits are the same on any number of threads. The rules'
  // documents are not looked at. No gradient. Throws Exception (kind internal) for a span that does not continue its
  // sequence.
  at::Tensor attend(int stage, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const models::AttentionRules& rules, const std::vector<CachedSpan>& spans);

 private:
  struct Layer {
    std::unique_ptr<std::byte[]> memory;
    at::Tensor keys, values;  // [kv heads, slots, head_dim]; token t is in slot t % slots
    std::int64_t slots = 0;
    std::int64_t tokens = 0;  // that came
    std::int64_t reach = 0;   // as LayerSpec has it
  };
  Layer& layer_of(int stage, const CachedSpan& span, const at::Tensor& k);
  bool stores(int stage) const;
  std::int64_t reach_of(int stage) const;
  std::int64_t slots_of(std::int64_t sequence, std::int64_t reach) const;
  // From storage, with those of its tokens that are there.
  void bring(Layer& layer, int stage, const CachedSpan& span, const at::Tensor& k);
  void put_back(const Layer& layer, int stage, const CachedSpan& span) const;

  const ModelSpec& spec_;
  std::vector<std::int64_t> capacities_;
  std::int64_t longest_span_;
  KeyValueStore* store_;
  std::vector<std::vector<Layer>> layers_;  // by sequence and stage
};

namespace models {

// attention() of a row; where it continues sequences, with what their cache has.
at::Tensor attention_of_row(int stage, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const AttentionRules& rules, const Shared& shared, double dropout);

}  // namespace models

}  // namespace tierflow

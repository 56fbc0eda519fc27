#pragma once
// Which tensors of a model are trained, and at which learning rate, by regular expressions (ECMAScript) that are
// searched anywhere in a tensor's name. A frozen tensor has no state and no gradient, and is never written.
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "runtime/spec/model_spec.h"

namespace tierflow {

struct TrainableConfig {
  std::vector<std::string> trainable;  // none: all
  std::vector<std::string> freeze;     // of these
  std::int64_t last_layers = 0;        // above 0: only this many last blocks, and nothing outside of blocks

  bool operator==(const TrainableConfig&) const = default;
};

// Throws Exception (kind usage) if a pattern fits no tensor's name (it lists some names), or if nothing is left to
// train.
void set_trainable(ModelSpec& spec, const TrainableConfig& config);
// The same from the text in ModelSpec::trainable_json.
void set_trainable_again(ModelSpec& spec, const std::string& json);

// Gives the model the adapters, the trained tensors and the base's format of `like`, which is a model of another size
// or of a store.
void train_as(ModelSpec& spec, const ModelSpec& like);

// The learning rate of tensors with a fitting name is multiplied; the first pattern that fits counts. Throws Exception
// (kind usage) for a pattern that fits no tensor that is trained.
void set_learning_rates(ModelSpec& spec, const std::vector<std::pair<std::string, double>>& by_pattern);

// Sets every dropout to 0, that of the adapters' input too.
void remove_dropout(ModelSpec& spec);

}  // namespace tierflow

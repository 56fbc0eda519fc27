#pragma once
// Which tensors of a model are trained, and how fast: by regular expression (ECMAScript) found anywhere in a tensor's
// name. What is frozen has no state and no gradient, and is never written.
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "runtime/spec/model_spec.h"

namespace tierflow {

struct TrainableConfig {
  std::vector<std::string> trainable;  // none: all
  std::vector<std::string> freeze;     // of these
  std::int64_t last_layers = 0;        // above 0: of blocks the last so many, and nothing outside of blocks

  bool operator==(const TrainableConfig&) const = default;
};

// Throws Exception (kind usage) for a pattern that no tensor's name has, with some names there are, and where nothing
// is left to train.
void set_trainable(ModelSpec& spec, const TrainableConfig& config);
// The same from what ModelSpec::trainable_json has.
void set_trainable_again(ModelSpec& spec, const std::string& json);

// Adapters, what is trained, and the base's format, as `like` has them: of another size or a store's.
void train_as(ModelSpec& spec, const ModelSpec& like);

// The learning rate of tensors with a fitting name is multiplied; the first pattern that fits counts. Throws Exception
// (kind usage) for a pattern that fits no tensor that is trained.
void set_learning_rates(ModelSpec& spec, const std::vector<std::pair<std::string, double>>& by_pattern);

// Nothing is dropped in training, adapters' input neither.
void remove_dropout(ModelSpec& spec);

}  // namespace tierflow

#pragma once
// The tables that turn tokens into hidden states, where nothing else uses them: of such a table a step uses the rows of
// its tokens, and the gradient of all others is zero.
#include <cstdint>
#include <vector>

#include "runtime/spec/model_spec.h"

namespace tierflow {

// The rows of a table that lie in one unit.
struct TokenTable {
  int unit = 0, tensor = 0;  // indices into ModelSpec::units and UnitSpec::tensors
  std::int64_t first_row = 0, rows = 0, columns = 0;
};

// In the order of their rows. Empty if the table is frozen or tied to the head, or the model consists of a user's own
// layers.
std::vector<TokenTable> token_tables(const ModelSpec& spec);

}  // namespace tierflow

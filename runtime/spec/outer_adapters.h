#pragma once
// Adapters beside the token table and the head, which lie outside of blocks. Inside of spec alone.
//
// The head: logits W x + scale * B(A(x)). Where it comes in tiles, A lies with the final norm, and each tile has the
// rows of B that its rows of W have: what A gives goes from stage to stage.
// The table: a token's row of W + scale * B a, where a is its column of PEFT's lora_embedding_A [rank, vocabulary]. In
// the model that is [vocabulary, rank], in the table's tiles; B [hidden, rank] lies in the last one.
#include <set>
#include <string>
#include <vector>

#include "runtime/spec/adapter_choice.h"
#include "runtime/spec/model_spec.h"

namespace tierflow {

// Adds those that `config` names and does not save. Erases the names that fit from `unused`, and appends the modules'
// paths to `modules`. Throws Exception (kind usage) for other tables, a tied table, and what these adapters have none
// of.
void add_outer_adapters(ModelSpec& spec, const AdapterConfig& config, AdapterChoice& choice,
                        std::set<std::string>& unused, std::vector<std::string>& modules);

}  // namespace tierflow

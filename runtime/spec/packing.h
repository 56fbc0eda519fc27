#pragma once
// How the tensors of a model lie in the units that stream: offsets, groups of one precision, and the swap layout that
// follows. No torch here.
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "optim/adamw.h"
#include "runtime/spec/model_spec.h"
#include "swap/layout.h"

namespace tierflow {

// Named policies for master weights and moments, which the store names.
enum class Precision : std::uint8_t { fp32_master_adam8, fp32_master_adam32, bf16_sr_adam8 };
Precision parse_precision(std::string_view name);  // throws Exception (usage) with the known names
const char* precision_name(Precision precision);

struct PackedTensor {
  int tensor = 0;              // index in UnitSpec::tensors
  std::uint64_t offset = 0;    // first element within the unit: a multiple of optim::kBlock
  std::uint64_t elements = 0;  // without padding; of a frozen tensor that is not bf16: its words
  bool decays = true;
  float lr_scale = 1;
};

struct StateFormat {
  optim::MasterFormat master = optim::MasterFormat::split;
  optim::MomentFormat moments = optim::MomentFormat::block8;
  bool updated = true;  // false: no step updates it, and it has no moments
};

struct PackedUnit {
  std::vector<PackedTensor> tensors;  // ordered by offset
  std::vector<StateFormat> formats;   // one for each group of the swap layout
  swap::UnitShape shape;
};

struct PackedModel {
  std::vector<PackedUnit> units;
  std::vector<swap::StageShape> stages;  // carry_bytes still 0
  Precision precision = Precision::fp32_master_adam8;
  std::uint64_t trainable_parameters = 0;
};
// embedding_part: above 0, the groups of the token tables (token_tables.h) are sparse, in chunks of so many elements
// (swap::GroupShape).
PackedModel pack(const ModelSpec& spec, Precision precision, std::uint64_t embedding_part = 0);
// The formats of states under a policy, each with the name that its groups have (swap::GroupShape::precision).
std::vector<std::pair<StateFormat, std::string>> state_formats(Precision precision);

// One array of a state, or its hi words, with an entry for each `each` elements.
struct StatePart {
  const char* suffix;  // of its name in a file, behind that of the tensor
  const char* dtype;   // as safetensors calls it
  std::uint64_t bytes, each;

  // Bytes of the entries of this many elements. The last entry may stand for fewer than `each` of them.
  std::uint64_t size(std::uint64_t elements) const { return bytes * ((elements + each - 1) / each); }
};
inline constexpr StatePart kWordPart{.suffix = "", .dtype = "BF16", .bytes = 2, .each = 1};
// In the order in which they lie in a chunk's state bytes: lo | m | v | absmax of m | absmax of v.
std::vector<StatePart> state_parts(const StateFormat& format);
// Typed pointers into one chunk's state bytes.
optim::State state_view(const StateFormat& format, std::uint64_t elements, std::uint16_t* words, std::byte* state);
// The AdamWParams::rounding_key of a tensor of a unit.
std::uint64_t rounding_key(std::uint64_t seed, int unit, int tensor);

// A run of a tensor's elements in a chunk, without padding.
struct TensorPiece {
  const PackedTensor* tensor = nullptr;  // null: any tensors that lie there
  std::uint64_t in_tensor = 0, in_chunk = 0, elements = 0;
};
// What the chunk has of its unit's tensors, in order; the model outlives it. Pieces have at most `most` elements, none
// across a multiple of it from the chunk's first element. If it is optim::kNormSegment, they are the same however the
// chunk's group is cut into chunks.
std::vector<TensorPiece> pieces_of(const PackedModel& model, const swap::Chunk& chunk,
                                   std::uint64_t most = ~std::uint64_t{0});
// The elements of all of them.
std::uint64_t parameters_in(const PackedModel& model, const swap::Chunk& chunk);

// The elements of a chunk with which a store's buffers stay within a host budget: a multiple of swap::kChunkQuantum.
std::uint64_t chunk_elements_for(std::uint64_t host_budget);

}  // namespace tierflow

#pragma once
// How parameters are cut for streaming: units (what is fetched and updated together) into chunks (what one buffer
// carries), and the extents that hold them in storage. Sizes in elements are padded; nothing here depends on where
// anything is placed.
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace tierflow::swap {

inline constexpr std::uint64_t kElementsPad =
    2048;  // groups are padded to it: hi words of a chunk fill whole 4 KiB sectors
inline constexpr std::uint64_t kChunkQuantum = 64 * 1024;  // chunks start at multiples of it within their group
inline constexpr std::uint64_t kSparseQuantum = 8 * 1024;  // the same for sparse groups (GroupShape)
inline constexpr std::uint64_t kSector = 4096;

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Bytes of this many hi words, or of their bf16 gradient. Every offset and size of words comes from here.
constexpr std::uint64_t word_bytes(std::uint64_t elements) {
  return 2 * elements;
}

// Consecutive elements of a unit whose optimizer state has one format.
struct GroupShape {
  bool trainable = true;                  // false: it has no gradients, and no step updates it
  bool rewritten = false;                 // only where it is not trainable: words and state are written between steps
  std::uint64_t elements = 0;             // multiple of kElementsPad
  std::uint32_t state_bytes_element = 0;  // optimizer state and low master words, for each parameter
  std::uint32_t state_bytes_block = 0;    // further state for each block of 256 parameters
  std::string precision;                  // named in the manifest
  // Above 0, only where it is trainable: the group is sparse. It is cut into chunks of so many elements, a multiple of
  // kSparseQuantum and at most kChunkQuantum, and a step may use some of them. It neither moves nor updates the others
  // (SparseChunks in fetcher.h).
  std::uint64_t sparse_elements = 0;

  std::uint64_t state_bytes(std::uint64_t n) const {
    if (!trainable && !rewritten) return 0;
    return round_up(n * state_bytes_element + n / 256 * state_bytes_block, kSector);
  }
};

struct UnitShape {
  std::string name;
  std::vector<GroupShape> groups;  // trainable ones first
};

struct StageShape {
  std::vector<int> units;              // own unit first
  std::vector<int> on_demand;          // further units that a visit may need; the visit names them while it runs
  bool backward_needs_weights = true;  // false for an embedding: its gradient depends on the ids alone
  std::uint64_t carry_bytes = 0;       // of its input for one computation of a step; 0 for the first stage
  // How many micro-batches one computation of a step takes: the first ones, then the next, and so on. `micro_batch` of
  // a task, and of enter(), is then the number of the computation in its stage. In an evaluation a computation always
  // takes one.
  int together = 1;

  // The number of computations in a step of this many micro-batches.
  int computations(int micro_batches) const { return (micro_batches + together - 1) / together; }
};

// The kinds of extents. A chunk can have one of each kind but the last.
// gradient: bf16, or the high words of an fp32 sum whose low words are gradient_low.
// activations: what leaves the device for an item; one extent for each item.
enum class ExtentKind : std::uint8_t { hi, state, gradient, gradient_low, activations };
inline constexpr int kExtentKinds = 5;
inline constexpr ExtentKind kChunkExtents[] = {ExtentKind::hi, ExtentKind::state, ExtentKind::gradient,
                                               ExtentKind::gradient_low};

struct Chunk {
  int id = 0;  // among all chunks of the layout
  int unit = 0, index = 0, group = 0;
  std::uint64_t first = 0;  // element offset in the unit
  std::uint64_t elements = 0;
  std::uint64_t state_bytes = 0;  // 0: it has no state
  bool trainable = true;
  bool rewritten = false;  // as in GroupShape
  bool sparse = false;     // of a sparse group

  // Whether its words change after they are loaded.
  bool changes() const { return trainable || rewritten; }
  std::uint64_t word_bytes() const { return swap::word_bytes(elements); }
  std::uint64_t word_place() const { return swap::word_bytes(first); }  // bytes from the unit's first word
  std::uint64_t bytes(ExtentKind kind) const { return kind == ExtentKind::state ? state_bytes : word_bytes(); }
};

// Shapes plus their cut. Chunk ids number all chunks of all units in order.
class Layout {
 public:
  // chunk_elements: multiple of kChunkQuantum; the largest chunk of a group whose state is 4 bytes an element. Groups
  // with more state are cut finer, so that no chunk's state exceeds max_state_bytes(). Sparse groups are cut as
  // GroupShape says, whatever chunk_elements is.
  // Throws std::logic_error if a unit has a frozen group before a trainable one, if a unit is on demand in one stage
  // and not in another, or if a sparse group is frozen, belongs to a unit that several stages use, or has chunks of
  // another size than GroupShape allows.
  Layout(std::vector<UnitShape> units, std::vector<StageShape> stages, std::uint64_t chunk_elements);

  const std::vector<UnitShape>& units() const { return units_; }
  const std::vector<StageShape>& stages() const { return stages_; }
  const std::vector<Chunk>& chunks() const { return chunks_; }
  std::span<const Chunk> chunks_of(int unit) const;
  // The chunks of its trainable groups, which come first; none for a frozen unit.
  std::span<const Chunk> trainable_chunks_of(int unit) const;
  // Bytes of the fp32 gradient of a unit's trainable elements, on the device; 0 for a frozen unit.
  std::uint64_t gradient_bytes(int unit) const { return gradient_bytes_[unit]; }
  int first_chunk(int unit) const { return first_chunk_[unit]; }
  std::uint64_t unit_elements(int unit) const { return unit_elements_[unit]; }
  std::uint64_t unit_word_bytes(int unit) const { return word_bytes(unit_elements_[unit]); }
  std::uint64_t chunk_elements() const { return chunk_elements_; }
  std::uint64_t max_word_bytes() const { return max_word_bytes_; }
  std::uint64_t max_state_bytes() const { return max_state_bytes_; }
  // Whether the unit is one on demand.
  bool on_demand(int unit) const { return on_demand_[unit]; }
  // How many stages use a unit; more than one if weights are tied.
  int users_of(int unit) const { return users_[unit]; }
  // The first stage that uses it; -1 if there is none.
  int first_user(int unit) const { return first_user_[unit]; }
  // What a place in RAM for any one unit on demand takes: by index of a chunk in its unit, the most bytes of its words.
  const std::vector<std::uint64_t>& on_demand_bytes() const { return on_demand_bytes_; }
  // Ids of the sparse chunks, in order.
  const std::vector<int>& sparse_chunks() const { return sparse_chunks_; }
  // GroupShape::sparse_elements of the first sparse group; 0 if there is none.
  std::uint64_t sparse_elements() const;

 private:
  std::vector<UnitShape> units_;
  std::vector<StageShape> stages_;
  std::vector<Chunk> chunks_;
  std::vector<int> first_chunk_, users_, first_user_, sparse_chunks_;
  std::vector<bool> on_demand_;
  std::vector<std::uint64_t> unit_elements_, gradient_bytes_, on_demand_bytes_;
  std::uint64_t chunk_elements_ = 0, max_word_bytes_ = 0, max_state_bytes_ = 0;
};

}  // namespace tierflow::swap

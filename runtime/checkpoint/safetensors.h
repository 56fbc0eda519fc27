#pragma once
// FRONT DOOR of checkpoint. Reading and writing safetensors, single file or sharded with model.safetensors.index.json.
// Headers are checked before anything is allocated (length, offsets contiguous and inside the file, size = shape x
// dtype in checked arithmetic, no duplicate); data moves by pread in the caller's pieces, never mapped. Pickles and
// other formats are refused by name and by magic with what to do instead.
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/base/progress.h"
#include "runtime/spec/weight_format.h"

namespace tierflow {

enum class Dtype : std::uint8_t { f32, bf16, f16 };
std::size_t dtype_size(Dtype dtype);

class PackedWeight;
struct RawTensor;

struct TensorEntry {
  Dtype dtype = Dtype::bf16;
  std::vector<std::int64_t> shape;
  int file = 0;              // index into Checkpoint::files()
  std::uint64_t offset = 0;  // of its first byte in that file
  std::uint64_t bytes = 0;
  // Not null where the folder stores the weight quantised (packed_weight.h). The fields above are then those of its
  // fp32 values.
  std::shared_ptr<const PackedWeight> packed = {};
};

struct TensorSpec;

// The tensors of an HF model folder. Weights that are stored in 4 or 8 bits with scales beside them are listed as one
// tensor; other tensors of other types than Dtype's (integers, 8-bit floats) are not.
class Checkpoint {
 public:
  // Throws Exception (kind input) naming file and tensor.
  static Checkpoint open(const std::filesystem::path& folder);
  // One file of a folder, all of its tensors.
  static Checkpoint open_file(const std::filesystem::path& folder, const std::string& name);
  Checkpoint(Checkpoint&&) noexcept;
  Checkpoint& operator=(Checkpoint&&) noexcept;
  ~Checkpoint();

  const std::map<std::string, TensorEntry, std::less<>>& tensors() const;
  const std::vector<std::filesystem::path>& files() const;
  const std::filesystem::path& folder() const;
  // Tensors of every type as they lie in the files, but for what quantised weights consist of.
  const std::map<std::string, RawTensor, std::less<>>& stored() const;
  // Bytes [offset, offset + out.size()) of one of them.
  void read_stored(const RawTensor& tensor, std::uint64_t offset, std::span<std::byte> out) const;
  // The tensor of that name, or of one of its aliases (checkpoint_aliases); null where there is none.
  const TensorEntry* find(std::string_view name) const;
  // The name that the tensor which find() finds has in the files; empty where it finds none.
  std::string name_in_files(std::string_view name) const;
  // Elements [first, first + out.size()) of a tensor, converted exactly to fp32 (of a quantised one the products of
  // codes and scales). Looks up as find() does. Any thread may call it.
  void read_f32(std::string_view name, std::uint64_t first, std::span<float> out) const;
  // Whether the tensor of that name is stored in this format. Looks up as find() does.
  bool has(std::string_view name, WeightFormat format) const;
  // Where it is: the stored bytes (weight_format.h) of a tensor, which may be a tile. Looks up as find() does.
  std::vector<std::byte> read_unconverted(const TensorSpec& tensor) const;
  // read_f32() of a tensor that may be a tile: elements count from its first row.
  void read_f32(const TensorSpec& tensor, std::uint64_t first, std::span<float> out) const;

 private:
  struct Impl;
  explicit Checkpoint(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Other names under which older checkpoints store the tensor that transformers now saves as `name`, most likely first.
std::vector<std::string> checkpoint_aliases(std::string_view name);

// model.safetensors, model-00001-of-00003.safetensors, and the index of such.
bool is_weights_name(const std::string& name);

// How a tensor is written: F32 where its format is fp32, else BF16.
Dtype dtype_of(const TensorSpec& tensor);

struct TensorHeader {
  std::string name;
  Dtype dtype = Dtype::bf16;
  std::vector<std::int64_t> shape;
  // Of a tensor that is copied: its type as the file spells it, and its size, in place of dtype.
  std::string stored_dtype = {};
  std::uint64_t stored_bytes = 0;
  bool trained = true;  // false: it is as it was read, finite or not
};

// Writes tensors in the order given at construction, streamed: shards of at most shard_bytes, named as transformers
// names them, every file under a temporary name until finish() flushes and renames it; the index comes after the
// shards, and config.json, where finish() is given one, when all else is durable. Unless finish() came to its end
// nothing is left, of a folder that held no model before.
class CheckpointWriter {
 public:
  CheckpointWriter(std::filesystem::path folder, std::vector<TensorHeader> tensors,
                   std::uint64_t shard_bytes = std::uint64_t{5} << 30);
  // PEFT's names: one file, adapter_model.safetensors, and adapter_config.json. What else is in the folder stays.
  struct Adapter {};
  CheckpointWriter(std::filesystem::path folder, std::vector<TensorHeader> tensors, Adapter);
  ~CheckpointWriter();
  // Of every weights file.
  void before_each_move(BeforeMove before);
  // The next numbers of the current tensor, whole ones; tensors follow one another in order.
  void write(std::span<const std::byte> bytes);
  void finish(std::string_view config_json = {});
  // The first tensor that got an infinity or no number; empty: none did. Tensors that are copied or not trained
  // are not looked at.
  const std::string& not_finite() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tierflow

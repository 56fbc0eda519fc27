#pragma once
// FRONT DOOR of checkpoint. Reads and writes safetensors, a single file or shards with model.safetensors.index.json.
// Headers are checked before anything is allocated (length, offsets contiguous and inside the file, size = shape x
// dtype in checked arithmetic, no duplicate). Data is read with pread in the caller's pieces, never mapped. Pickles and
// other formats are recognised by name and by magic number, and refused with what to do instead.
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
  // Not null if the folder stores the weight quantised (packed_weight.h). The fields above are then those of its fp32
  // values.
  std::shared_ptr<const PackedWeight> packed = {};
};

struct TensorSpec;

// The tensors of an HF model folder. A weight that is stored in 4 or 8 bits with scales beside it is listed as one
// tensor. Other tensors whose type is not a Dtype (integers, 8-bit floats) are not listed.
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
  // CheckpointWriter::Adapter::base_weights of the file of open_file(); empty if it says nothing.
  std::string base_weights() const;
  // Tensors of every type as they lie in the files, without the parts of quantised weights.
  const std::map<std::string, RawTensor, std::less<>>& stored() const;
  // Bytes [offset, offset + out.size()) of one of them.
  void read_stored(const RawTensor& tensor, std::uint64_t offset, std::span<std::byte> out) const;
  // The tensor of that name, or of one of its aliases (checkpoint_aliases); null if there is none.
  const TensorEntry* find(std::string_view name) const;
  // The name in the files of the tensor that find() finds; empty if it finds none.
  std::string name_in_files(std::string_view name) const;
  // Elements [first, first + out.size()) of a tensor, converted exactly to fp32 (of a quantised one the products of
  // codes and scales). Finds the tensor as find() does. Any thread may call it.
  void read_f32(std::string_view name, std::uint64_t first, std::span<float> out) const;
  // Whether the tensor of that name is stored in this format. Finds it as find() does.
  bool has(std::string_view name, WeightFormat format) const;
  // The stored bytes (weight_format.h) of a tensor for which has() is true. It may be a tile.
  std::vector<std::byte> read_unconverted(const TensorSpec& tensor) const;
  // read_f32() for a tensor that may be a tile: elements count from its first row.
  void read_f32(const TensorSpec& tensor, std::uint64_t first, std::span<float> out) const;

 private:
  struct Impl;
  explicit Checkpoint(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Other names under which older checkpoints store the tensor that transformers now saves as `name`, most likely first.
std::vector<std::string> checkpoint_aliases(std::string_view name);

// Whether it is the name of a weights file or of an index: model.safetensors, model-00001-of-00003.safetensors,
// model.safetensors.index.json.
bool is_weights_name(const std::string& name);

// How a tensor is written: F32 if its format is fp32, else BF16.
Dtype dtype_of(const TensorSpec& tensor);

struct TensorHeader {
  std::string name;
  Dtype dtype = Dtype::bf16;
  std::vector<std::int64_t> shape;
  // For a tensor that is copied, instead of dtype: its type as the file spells it, and its size.
  std::string stored_dtype = {};
  std::uint64_t stored_bytes = 0;
  bool trained = true;  // false: it is written as it was read, finite or not
};

// Writes tensors in the order given at construction, streamed, into shards of at most shard_bytes, named as
// transformers names them. Every file has a temporary name until finish() flushes and renames it. The index comes after
// the shards; config.json, if finish() is given one, comes when all else is durable. If finish() does not succeed,
// nothing is left in a folder that held no model before.
class CheckpointWriter {
 public:
  CheckpointWriter(std::filesystem::path folder, std::vector<TensorHeader> tensors,
                   std::uint64_t shard_bytes = std::uint64_t{5} << 30);
  // With PEFT's names: one file, adapter_model.safetensors, and adapter_config.json. Other files in the folder stay.
  struct Adapter {
    std::string base_weights =
        {};  // hash_text() of the weights_hash() of the model that they are for; empty: not known
  };
  CheckpointWriter(std::filesystem::path folder, std::vector<TensorHeader> tensors, Adapter);
  ~CheckpointWriter();
  // `before` is called before each piece of a weights file is written or read back.
  void before_each_move(BeforeMove before);
  // Writes the next numbers of the current tensor. `bytes` holds whole numbers; tensors follow one another in order.
  void write(std::span<const std::byte> bytes);
  void finish(std::string_view config_json = {});
  // The name of the first tensor that got an infinity or a NaN; empty: none did. Tensors that are copied or not trained
  // are not checked.
  const std::string& not_finite() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tierflow

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <optional>
#include <set>
#include <system_error>

#include "runtime/base/exception.h"
#include "runtime/base/files.h"
#include "runtime/base/machine.h"
#include "runtime/base/sequential_file.h"
#include "runtime/base/strict_json.h"
#include "runtime/checkpoint/safetensors.h"
#include "runtime/checkpoint/safetensors_header.h"

namespace tierflow {
namespace {

constexpr const char* index_name = "model.safetensors.index.json";
constexpr const char* config_name = "config.json";
constexpr const char* adapter_name = "adapter_model.safetensors";
constexpr const char* adapter_config_name = "adapter_config.json";

std::string dtype_name(const TensorHeader& tensor) {
  if (!tensor.stored_dtype.empty()) return tensor.stored_dtype;
  return tensor.dtype == Dtype::f32 ? "F32" : tensor.dtype == Dtype::bf16 ? "BF16" : "F16";
}

std::uint64_t bytes_of(const TensorHeader& tensor, const std::string& where) {
  if (!tensor.stored_dtype.empty()) return tensor.stored_bytes;
  std::uint64_t bytes = dtype_size(tensor.dtype);
  for (const std::int64_t size : tensor.shape)
    if (size < 0 || __builtin_mul_overflow(bytes, static_cast<std::uint64_t>(size), &bytes))
      fail(io::ErrorKind::usage, where,
           fmt::format("the tensor \"{}\" has an impossible shape", printable(tensor.name)));
  return bytes;
}

// `exponent`: all ones in its place. Compilers make vectors of this loop.
template <class Word>
bool any_all_ones(std::span<const std::byte> bytes, Word exponent) {
  Word found = 0;
  for (std::size_t i = 0; i < bytes.size() / sizeof(Word); ++i) {
    Word word;
    std::memcpy(&word, bytes.data() + i * sizeof word, sizeof word);
    found |= static_cast<Word>((word & exponent) == exponent);
  }
  return found != 0;
}

// Of whole numbers of that type.
bool any_not_finite(std::span<const std::byte> bytes, Dtype dtype) {
  if (dtype == Dtype::f32) return any_all_ones<std::uint32_t>(bytes, 0x7f800000);
  return any_all_ones<std::uint16_t>(bytes, dtype == Dtype::bf16 ? 0x7f80 : 0x7c00);
}

bool is_shard_name(std::string name) {
  std::replace_if(
      name.begin(), name.end(), [](unsigned char c) { return std::isdigit(c) != 0; }, '#');
  return name == "model.safetensors" || name == "model-#####-of-#####.safetensors";
}

struct Shard {
  std::size_t first = 0, last = 0;  // tensors [first, last)
  std::uint64_t bytes = 0;
  std::string name;
};

}  // namespace

bool is_weights_name(const std::string& name) {
  return name == index_name || is_shard_name(name);
}

struct CheckpointWriter::Impl {
  std::filesystem::path folder;
  bool adapter = false;
  std::vector<TensorHeader> tensors;
  std::vector<std::uint64_t> sizes;
  std::vector<Shard> shards;
  std::uint64_t total = 0;
  std::size_t shard = 0, tensor = 0;
  std::uint64_t in_tensor = 0;
  std::string not_finite, base_weights;
  std::optional<SequentialFile> file;
  BeforeMove before_move;
  std::set<std::filesystem::path> temporaries, in_place;
  bool made_folder = false, replaces = false, finished = false;

  ~Impl() {
    file.reset();
    for (const auto& path : temporaries) unlink(path.c_str());
    if (!finished && !replaces)
      for (const auto& path : in_place) unlink(path.c_str());
    if (made_folder && !finished) rmdir(folder.c_str());
  }

  void begin(std::filesystem::path into, std::vector<TensorHeader> all, std::uint64_t shard_bytes) {
    folder = std::move(into);
    tensors = std::move(all);
    divide(shard_bytes);
    std::error_code ignored;
    made_folder = !std::filesystem::exists(folder, ignored);
    make_folder(folder);
    replaces = holds_weights();
    check_space();
    skip_full();
  }

  std::filesystem::path temporary(std::size_t index) const { return folder / (shards[index].name + ".partial"); }

  void divide(std::uint64_t shard_bytes) {
    std::set<std::string_view> names;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      if (!names.insert(tensors[i].name).second)
        fail(io::ErrorKind::usage, folder.string(), "the tensor " + tensors[i].name + " is to be written twice");
      sizes.push_back(bytes_of(tensors[i], folder.string()));
      if (__builtin_add_overflow(total, sizes[i], &total))
        fail(io::ErrorKind::usage, folder.string(), "the tensors' size overflows");
      if (shards.empty() ||
          (shards.back().bytes != 0 && sizes[i] > shard_bytes - std::min(shard_bytes, shards.back().bytes)))
        shards.push_back({.first = i, .last = i});
      shards.back().last = i + 1;
      shards.back().bytes += sizes[i];
    }
    if (shards.empty()) shards.push_back({});
    for (std::size_t i = 0; i < shards.size(); ++i)
      shards[i].name = adapter              ? adapter_name
                       : shards.size() == 1 ? "model.safetensors"
                                            : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
  }

  void check_space() const {
    const std::uint64_t free = free_space(folder);
    if (free < total)
      fail(io::ErrorKind::environment, folder.string(),
           fmt::format("has {} free, but the model takes {}: free some space or give another folder", human_bytes(free),
                       human_bytes(total)));
  }

  void open_shard() {
    const Shard& current = shards[shard];
    Json header;
    header["__metadata__"]["format"] = "pt";
    if (!base_weights.empty()) header["__metadata__"][kBaseWeights] = base_weights;
    std::uint64_t offset = 0;
    for (std::size_t i = current.first; i < current.last; ++i) {
      header[tensors[i].name] = {{"dtype", dtype_name(tensors[i])},
                                 {"shape", tensors[i].shape},
                                 {"data_offsets", {offset, offset + sizes[i]}}};
      offset += sizes[i];
    }
    std::string text = header.dump();
    text.append((8 - text.size() % 8) % 8, ' ');
    const std::uint64_t length = text.size();
    text.insert(0, reinterpret_cast<const char*>(&length), sizeof length);
    file.emplace(temporary(shard), text.size() + current.bytes);
    file->before_each_move(before_move);
    temporaries.insert(temporary(shard));
    file->write(std::as_bytes(std::span(text.data(), text.size())));
  }

  void close_shard() {
    file->finish();
    file.reset();
    ++shard;
  }

  // Goes past what needs no more bytes: full tensors, empty tensors, full shards.
  void skip_full() {
    while (shard < shards.size()) {
      if (!file) open_shard();
      while (tensor < shards[shard].last && in_tensor == sizes[tensor]) {
        ++tensor;
        in_tensor = 0;
      }
      if (tensor < shards[shard].last) return;
      close_shard();
    }
  }

  void put_in_place() {
    std::set<std::string> ours;
    // Without the index, a reader that comes in between finds no model rather than a mixture of two.
    if (!adapter) unlink((folder / index_name).c_str());
    for (std::size_t i = 0; i < shards.size(); ++i) {
      const auto path = folder / shards[i].name;
      if (rename(temporary(i).c_str(), path.c_str()) != 0) fail_system("rename", path.string(), errno);
      temporaries.erase(temporary(i));
      in_place.insert(path);
      ours.insert(shards[i].name);
    }
    if (adapter) return;
    std::vector<std::filesystem::path> stale;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      const std::string name = entry.path().filename().string();
      if (ours.count(name) == 0 && is_shard_name(name)) stale.push_back(entry.path());
    }
    for (const auto& path : stale) unlink(path.c_str());
  }

  bool holds_weights() const {
    std::error_code ignored;
    if (adapter) return std::filesystem::exists(folder / adapter_name, ignored);
    for (const auto& entry : std::filesystem::directory_iterator(folder, ignored))
      if (is_weights_name(entry.path().filename().string())) return true;
    return false;
  }

  void write_index() {
    Json index;
    index["metadata"]["total_size"] = total;
    Json& map = index["weight_map"] = Json::object();
    for (const Shard& current : shards)
      for (std::size_t i = current.first; i < current.last; ++i) map[tensors[i].name] = current.name;
    in_place.insert(folder / index_name);
    write_text(folder / index_name, index.dump(2) + "\n");
  }
};

CheckpointWriter::CheckpointWriter(std::filesystem::path folder, std::vector<TensorHeader> tensors,
                                   std::uint64_t shard_bytes)
    : impl_(std::make_unique<Impl>()) {
  impl_->begin(std::move(folder), std::move(tensors), shard_bytes);
}

CheckpointWriter::CheckpointWriter(std::filesystem::path folder, std::vector<TensorHeader> tensors, Adapter adapter)
    : impl_(std::make_unique<Impl>()) {
  impl_->adapter = true;
  impl_->base_weights = std::move(adapter.base_weights);
  impl_->begin(std::move(folder), std::move(tensors), UINT64_MAX);
}

CheckpointWriter::~CheckpointWriter() = default;

void CheckpointWriter::before_each_move(BeforeMove before) {
  impl_->before_move = std::move(before);
  if (impl_->file) impl_->file->before_each_move(impl_->before_move);
}

void CheckpointWriter::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    if (impl_->shard == impl_->shards.size())
      fail(io::ErrorKind::usage, impl_->folder.string(), "more bytes were written than the tensors have");
    const std::uint64_t room = impl_->sizes[impl_->tensor] - impl_->in_tensor;
    const auto piece = bytes.first(std::min<std::uint64_t>(bytes.size(), room));
    const TensorHeader& tensor = impl_->tensors[impl_->tensor];
    if (impl_->not_finite.empty() && tensor.stored_dtype.empty() && tensor.trained &&
        any_not_finite(piece, tensor.dtype))
      impl_->not_finite = tensor.name;
    impl_->file->write(piece);
    impl_->in_tensor += piece.size();
    impl_->skip_full();
    bytes = bytes.subspan(piece.size());
  }
}

const std::string& CheckpointWriter::not_finite() const {
  return impl_->not_finite;
}

void CheckpointWriter::finish(std::string_view config_json) {
  if (impl_->shard != impl_->shards.size())
    fail(io::ErrorKind::usage, impl_->folder.string(),
         "the tensor " + impl_->tensors[impl_->tensor].name + " was not written to its end");
  impl_->put_in_place();
  if (impl_->shards.size() > 1) impl_->write_index();
  sync_folder(impl_->folder);  // what says that the model is whole comes when everything else is durable
  if (!config_json.empty()) {
    write_text(impl_->folder / (impl_->adapter ? adapter_config_name : config_name), config_json);
    sync_folder(impl_->folder);
  }
  impl_->finished = true;
}

}  // namespace tierflow

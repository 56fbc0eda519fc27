#include "runtime/checkpoint/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <set>
#include <system_error>

#include "runtime/base/exception.h"
#include "runtime/base/files.h"
#include "runtime/base/strict_json.h"
#include "runtime/checkpoint/packed_weight.h"
#include "runtime/checkpoint/safetensors_header.h"
#include "runtime/spec/model_spec.h"

namespace tierflow {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors and the state format are little-endian");

constexpr std::size_t most_files = 4096;
constexpr std::size_t piece_elements = 256 << 10;
constexpr const char* single_name = "model.safetensors";
constexpr const char* index_name = "model.safetensors.index.json";

bool ends_with(std::string_view text, std::string_view suffix) {
  return text.size() >= suffix.size() && text.substr(text.size() - suffix.size()) == suffix;
}

// What the folder holds in place of safetensors, for the error.
[[noreturn]] void fail_without_model(const std::filesystem::path& folder) {
  std::string pickle, gguf, other;
  std::error_code error;
  for (std::filesystem::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (ends_with(name, ".bin") || ends_with(name, ".pt") || ends_with(name, ".pth") || ends_with(name, ".ckpt"))
      pickle = name;
    if (ends_with(name, ".gguf")) gguf = name;
    if (ends_with(name, ".safetensors")) other = name;
  }
  const std::string missing = fmt::format("holds neither {} nor {}", single_name, index_name);
  if (!pickle.empty())
    fail_input(folder.string(),
               fmt::format("{}; {} looks like a pickle, which can run code when it is loaded and is never read here: "
                           "convert it with transformers' save_pretrained(..., safe_serialization=True)",
                           missing, printable(pickle)));
  if (!gguf.empty())
    fail_input(folder.string(),
               fmt::format("{}; {} is a GGUF file: give the model it was made from", missing, printable(gguf)));
  if (!other.empty())
    fail_input(folder.string(), fmt::format("{}; {} is not named as transformers names it", missing, printable(other)));
  fail_input(folder.string(), missing + ": not a Hugging Face model folder");
}

std::vector<HeaderEntry> read_header(const File& file, const std::filesystem::path& path, std::uint64_t& data_start,
                                     std::map<std::string, std::string>& metadata) {
  const std::string where = path.string();
  const std::uint64_t size = file_size(file, path);
  std::byte head[32] = {};
  read_exactly(file, path, 0, std::span(head).first(std::min<std::uint64_t>(size, sizeof head)));
  std::uint64_t length = 0;
  std::memcpy(&length, head, sizeof length);
  // A length may happen to begin as another format does.
  if (size < 9 || length > size - 8 || head[8] != std::byte{'{'})
    if (const std::string foreign = describe_foreign(head); !foreign.empty())
      fail_input(where, fmt::format("is {}; only safetensors files are read", foreign));
  if (size < 8) fail_input(where, fmt::format("is {} bytes long: not a safetensors file", size));
  if (length == 0 || length > size - 8)
    fail_input(where,
               fmt::format("says that its header has {} bytes, in a file of {}: truncated, or not a safetensors file",
                           length, size));
  if (length > safetensors_header_limit)
    fail_input(where, fmt::format("has a header of {} bytes; at most {} are read", length, safetensors_header_limit));
  std::string json(length, '\0');
  read_exactly(file, path, 8, std::as_writable_bytes(std::span(json.data(), json.size())));
  data_start = 8 + length;
  return parse_safetensors_header(json, size - data_start, where, &metadata);
}

float from_bf16(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

float from_f16(std::uint16_t bits) {
  const std::uint32_t sign = (bits & 0x8000u) << 16, rest = bits & 0x7fffu;
  if (rest >= 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  // Shifted into place, the exponent is 112 too low; the multiplication also normalises subnormals, exactly.
  const float scaled = std::bit_cast<float>(rest << 13) * 0x1p112f;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(scaled) | sign);
}

template <class Convert>
void read_halves(const File& file, const std::filesystem::path& path, std::uint64_t offset, std::span<float> out,
                 Convert convert) {
  std::vector<std::uint16_t> scratch(std::min(out.size(), piece_elements));
  while (!out.empty()) {
    const std::size_t count = std::min(out.size(), piece_elements);
    read_exactly(file, path, offset, std::as_writable_bytes(std::span(scratch).first(count)));
    for (std::size_t i = 0; i < count; ++i) out[i] = convert(scratch[i]);
    out = out.subspan(count);
    offset += count * sizeof(std::uint16_t);
  }
}

}  // namespace

std::size_t dtype_size(Dtype dtype) {
  return dtype == Dtype::f32 ? 4 : 2;
}

struct Checkpoint::Impl {
  std::filesystem::path folder;
  std::vector<std::filesystem::path> paths;
  std::vector<File> files;
  std::map<std::string, std::string> metadata;  // of the last of them
  std::map<std::string, TensorEntry, std::less<>> tensors;
  std::map<std::string, RawTensor, std::less<>> raw;     // of every type
  std::map<std::string, RawTensor, std::less<>> stored;  // without what makes quantised weights
  const PackedParts parts = {
      .find =
          [this](const std::string& name) {
            const auto found = raw.find(name);
            return found == raw.end() ? nullptr : &found->second;
          },
      .read =
          [this](const RawTensor& tensor, std::uint64_t offset, std::span<std::byte> out) {
            const auto file = static_cast<std::size_t>(tensor.file);
            if (offset > tensor.bytes || out.size() > tensor.bytes - offset)
              fail(io::ErrorKind::internal, paths[file].string(), "a stored tensor is read beyond its end");
            read_exactly(files[file], paths[file], tensor.offset + offset, out);
          },
      .floats = [this](const std::string& name, std::uint64_t first,
                       std::span<float> out) { read_plain(entry_of(raw.find(name)->second), first, out); }};

  // `wanted`: the tensors that the index places in this file; null takes all.
  void add_file(const std::string& name, const std::set<std::string>* wanted) {
    const int index = static_cast<int>(files.size());
    paths.push_back(folder / name);
    files.push_back(open_beneath(folder, name));
    std::uint64_t data_start = 0;
    std::size_t found = 0;
    for (HeaderEntry& entry : read_header(files.back(), paths.back(), data_start, metadata)) {
      if (wanted != nullptr && wanted->count(entry.name) == 0) continue;
      ++found;
      RawTensor tensor{.dtype = std::move(entry.dtype),
                       .shape = std::move(entry.shape),
                       .file = index,
                       .offset = data_start + entry.begin,
                       .bytes = entry.end - entry.begin};
      if (tensor.dtype == "F32" || tensor.dtype == "BF16" || tensor.dtype == "F16")
        tensors.emplace(entry.name, entry_of(tensor));
      raw.emplace(std::move(entry.name), std::move(tensor));
    }
    if (wanted == nullptr || found == wanted->size()) return;
    for (const std::string& tensor : *wanted)
      if (raw.find(tensor) == raw.end())
        fail_input(paths.back().string(),
                   fmt::format("lacks the tensor \"{}\", which {} places there", printable(tensor), index_name));
  }

  void add_index() {
    const std::filesystem::path path = folder / index_name;
    const Json root = parse_json(read_text(open_beneath(folder, index_name), path, 64 << 20), path.string());
    const auto map = root.is_object() ? root.find("weight_map") : root.end();
    if (map == root.end() || !map->is_object() || map->empty())
      fail_input(path.string(), "has no weight_map from tensors to files");
    std::map<std::string, std::set<std::string>> by_file;
    for (const auto& [tensor, file] : map->items()) {
      if (!file.is_string())
        fail_input(path.string(), fmt::format("places the tensor \"{}\" in no file", printable(tensor)));
      const auto& name = file.get_ref<const std::string&>();
      if (name.find('/') != std::string::npos)
        fail_input(path.string(), fmt::format("places the tensor \"{}\" in \"{}\", outside the model's folder",
                                              printable(tensor), printable(name)));
      if (!ends_with(name, ".safetensors"))
        fail_input(path.string(), fmt::format("places the tensor \"{}\" in \"{}\", which is not a .safetensors file",
                                              printable(tensor), printable(name)));
      by_file[name].insert(tensor);
    }
    if (by_file.size() > most_files)
      fail_input(path.string(), fmt::format("names {} files, more than {}", by_file.size(), most_files));
    for (const auto& [name, wanted] : by_file) add_file(name, &wanted);
  }

  static TensorEntry entry_of(const RawTensor& tensor) {
    const Dtype dtype = tensor.dtype == "F32" ? Dtype::f32 : tensor.dtype == "BF16" ? Dtype::bf16 : Dtype::f16;
    return {.dtype = dtype, .shape = tensor.shape, .file = tensor.file, .offset = tensor.offset, .bytes = tensor.bytes};
  }

  // Puts the parts of quantised weights together.
  void assemble() {
    stored = raw;
    for (const auto& [codes, tensor] : raw) {
      const std::string name = packed_name(codes);
      auto packed = packed_weight(name, folder.string(), parts);
      if (packed == nullptr) continue;
      TensorEntry entry{.dtype = Dtype::f32, .shape = packed->shape(), .file = tensor.file, .bytes = sizeof(float)};
      for (const std::int64_t size : entry.shape) entry.bytes *= static_cast<std::uint64_t>(size);
      stored.erase(codes);
      for (const std::string& part : packed->parts()) {
        tensors.erase(part);
        stored.erase(part);
      }
      entry.packed = std::move(packed);
      tensors.insert_or_assign(name, std::move(entry));
    }
  }

  void read_plain(const TensorEntry& entry, std::uint64_t first, std::span<float> out) const {
    const auto& path = paths[static_cast<std::size_t>(entry.file)];
    const File& file = files[static_cast<std::size_t>(entry.file)];
    const std::uint64_t offset = entry.offset + first * dtype_size(entry.dtype);
    if (entry.dtype == Dtype::f32) read_exactly(file, path, offset, std::as_writable_bytes(out));
    if (entry.dtype == Dtype::bf16) read_halves(file, path, offset, out, from_bf16);
    if (entry.dtype == Dtype::f16) read_halves(file, path, offset, out, from_f16);
  }
};

Checkpoint::Checkpoint(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;
Checkpoint& Checkpoint::operator=(Checkpoint&&) noexcept = default;
Checkpoint::~Checkpoint() = default;

Checkpoint Checkpoint::open(const std::filesystem::path& folder) {
  std::error_code error;
  if (!std::filesystem::is_directory(folder, error))
    fail_input(folder.string(), std::filesystem::exists(folder, error)
                                    ? "is not a folder; give the folder that holds config.json and the safetensors"
                                    : "does not exist; give the folder of a Hugging Face model");
  auto impl = std::make_unique<Impl>();
  impl->folder = folder;
  const auto present = [&](const char* name) {
    return std::filesystem::exists(std::filesystem::symlink_status(folder / name, error));
  };
  if (present(single_name)) {
    impl->add_file(single_name, nullptr);
  } else if (present(index_name)) {
    impl->add_index();
  } else {
    fail_without_model(folder);
  }
  impl->assemble();
  return Checkpoint(std::move(impl));
}

Checkpoint Checkpoint::open_file(const std::filesystem::path& folder, const std::string& name) {
  auto impl = std::make_unique<Impl>();
  impl->folder = folder;
  impl->add_file(name, nullptr);
  impl->stored = impl->raw;
  return Checkpoint(std::move(impl));
}

const std::map<std::string, TensorEntry, std::less<>>& Checkpoint::tensors() const {
  return impl_->tensors;
}
const std::vector<std::filesystem::path>& Checkpoint::files() const {
  return impl_->paths;
}

const std::filesystem::path& Checkpoint::folder() const {
  return impl_->folder;
}

std::string Checkpoint::base_weights() const {
  const auto found = impl_->metadata.find(kBaseWeights);
  return found == impl_->metadata.end() ? "" : found->second;
}

const std::map<std::string, RawTensor, std::less<>>& Checkpoint::stored() const {
  return impl_->stored;
}

void Checkpoint::read_stored(const RawTensor& tensor, std::uint64_t offset, std::span<std::byte> out) const {
  impl_->parts.read(tensor, offset, out);
}

const TensorEntry* Checkpoint::find(std::string_view name) const {
  const auto found = impl_->tensors.find(name_in_files(name));
  return found == impl_->tensors.end() ? nullptr : &found->second;
}

std::string Checkpoint::name_in_files(std::string_view name) const {
  if (impl_->tensors.contains(name)) return std::string(name);
  for (const std::string& alias : checkpoint_aliases(name))
    if (impl_->tensors.contains(alias)) return alias;
  return "";
}

void Checkpoint::read_f32(std::string_view name, std::uint64_t first, std::span<float> out) const {
  const TensorEntry* entry = find(name);
  if (entry == nullptr) {
    const auto unread = impl_->raw.find(name);
    fail_input(impl_->folder.string(), unread == impl_->raw.end()
                                           ? fmt::format("has no tensor \"{}\"", printable(name))
                                           : fmt::format("stores the tensor \"{}\" as {}; F32, BF16 and F16 are read",
                                                         printable(name), unread->second.dtype));
  }
  const std::uint64_t size = dtype_size(entry->dtype), count = entry->bytes / size;
  const auto& path = impl_->paths[static_cast<std::size_t>(entry->file)];
  if (first > count || out.size() > count - first)
    fail(io::ErrorKind::usage, path.string(),
         fmt::format("elements {} to {} of the tensor \"{}\", which has {}", first, first + out.size(), printable(name),
                     count));
  if (entry->packed != nullptr)
    entry->packed->read(first, out);
  else
    impl_->read_plain(*entry, first, out);
}

bool Checkpoint::has(std::string_view name, WeightFormat format) const {
  const TensorEntry* entry = find(name);
  return entry != nullptr && entry->packed != nullptr && entry->packed->has(format);
}

std::vector<std::byte> Checkpoint::read_unconverted(const TensorSpec& tensor) const {
  return find(tensor.name)
      ->packed->read_unconverted(tensor.format, static_cast<std::uint64_t>(tensor.first_element()),
                                 static_cast<std::uint64_t>(tensor.elements()));
}

void Checkpoint::read_f32(const TensorSpec& tensor, std::uint64_t first, std::span<float> out) const {
  read_f32(std::string_view(tensor.name), first + static_cast<std::uint64_t>(tensor.first_element()), out);
}

std::vector<std::string> checkpoint_aliases(std::string_view name) {
  // Checkpoints saved from the bare model, without its language-modelling head, lack the first component; others have
  // one more. Models of text and images have their text model within.
  std::vector<std::string> aliases;
  for (const std::string_view prefix : {"transformer.", "model.", "gpt_neox."})
    if (name.substr(0, prefix.size()) == prefix) aliases.emplace_back(name.substr(prefix.size()));
  if (name.starts_with("model.")) {
    aliases.push_back("model.language_model." + std::string(name.substr(6)));
    aliases.push_back("language_model." + std::string(name));
  }
  for (const std::string_view adapted :
       {std::string_view("base_model.model.model."), std::string_view("base_model.model.")})
    if (name.starts_with(adapted))
      aliases.push_back(std::string(adapted) + "language_model." + std::string(name.substr(adapted.size())));
  if (name == "lm_head.weight") aliases.emplace_back("language_model.lm_head.weight");
  // GPT-NeoX's head has one name in most folders and another in models of transformers 5.
  if (name == "embed_out.weight") aliases.emplace_back("lm_head.weight");
  if (name == "base_model.model.lm_head.weight") aliases.emplace_back("base_model.model.embed_out.weight");
  if (name.substr(0, 14) == "model.decoder.") {
    aliases.emplace_back(name.substr(14));
    aliases.emplace_back("model." + std::string(name));
  }
  return aliases;
}

Dtype dtype_of(const TensorSpec& tensor) {
  return tensor.format == WeightFormat::fp32 ? Dtype::f32 : Dtype::bf16;
}

}  // namespace tierflow
